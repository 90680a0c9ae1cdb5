"""Reader of a program's text alone, without the function that it was compiled from."""

import dataclasses
from collections.abc import Mapping

from xlacensus.findings import Finding
from xlacensus.formatting import format_bytes, format_count
from xlacensus.hlo.buffers import buffers_of, peak_of
from xlacensus.hlo.flops import read_matmuls, unpriced_kernels
from xlacensus.hlo.ledger import Ledger
from xlacensus.hlo.parser import bytes_of, parse_module
from xlacensus.lints import lint_host


@dataclasses.dataclass(frozen=True)
class ProgramText:
    """Collectives, FLOPs and memory of one device, read from a program's text."""

    name: str
    ledger: Ledger
    flops: float
    """FLOPs of all matrix products; a loop's body counts as often as it runs."""
    unpriced: Mapping[str, int]
    """Executions of the kernels whose FLOPs are not known, by name."""
    arguments: int
    """Bytes of the program's arguments."""
    temporaries: int
    """Most bytes of temporaries that are live at once: an estimate,
    which the compiler's heap exceeds by its gaps."""
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.name}, one device",
            f"{format_count(self.flops):>10}  FLOPs of matrix products",
            f"{format_bytes(self.arguments):>10}  arguments",
            f"{format_bytes(self.temporaries):>10}  temporaries at the peak, estimated",
        ]
        for kernel, count in self.unpriced.items():
            lines.append(f"{count:>10}  executions of {kernel}, whose FLOPs are not known")
        return "\n".join(lines)


def read_program_text(text: str, mesh: Mapping[str, int] | None = None) -> ProgramText:
    """Reads the text of a compiled program. Raises CensusError if it is none.

    mesh: degree of each axis, outermost first, which names the axes of the collectives.
    """
    module = parse_module(text)
    parameters = module.entry.parameters.values()
    return ProgramText(
        name=module.name,
        ledger=Ledger.read(module, mesh),
        flops=sum(matmul.flops for matmul in read_matmuls(module)),
        unpriced=unpriced_kernels(module),
        arguments=sum(bytes_of(parameter.shape) for parameter in parameters),
        temporaries=peak_of(buffers_of(module, None)).live_bytes,
        findings=tuple(lint_host(module)),
    )
