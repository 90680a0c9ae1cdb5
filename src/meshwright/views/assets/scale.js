// Scales from data to pixels, ticks, and how seconds, bytes, counts and fractions are written.

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const COUNTS = ["", " k", " M", " B", " T", " P", " E"];

function digits(value, most = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(most)));
}

function seconds(value) {
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${digits(value * 1e6)} µs`;
  if (size < 1) return `${digits(value * 1e3)} ms`;
  if (size < 600) return `${digits(value)} s`;
  if (size < 7200) return `${digits(value / 60)} min`;
  if (size < 172800) return `${digits(value / 3600)} h`;
  return `${digits(value / 86400)} days`;
}

function bytes(value) {
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < BYTES.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${digits(size)} ${BYTES[unit]}`;
}

function count(value) {
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= 1000 && unit < COUNTS.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${digits(size)}${COUNTS[unit]}`;
}

/** One digit behind the point: more than that no prediction and no measurement here can hold. */
function percent(value) {
  const hundredths = value * 100;
  const size = Math.abs(hundredths);
  if (size === 0 || size >= 99.95) return `${Math.round(hundredths).toLocaleString("en")}%`;
  return `${size < 0.1 ? digits(hundredths, 1) : hundredths.toFixed(1)}%`;
}

const FORMATS = {
  seconds,
  bytes,
  count,
  number: (value) => digits(value, 4),
  integer: (value) => Math.round(value).toLocaleString("en"),
  fraction: percent,
  days: (value) => `${digits(value)} days`,
  dollars: (value) => (Math.abs(value) >= 1e6 ? `$${digits(value / 1e6)} M` : `$${digits(value)}`),
};

/** Writes a value in its unit; a text is written as it is, and a missing value as a dash. */
export function format(value, unit = "number") {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  return (FORMATS[unit] ?? FORMATS.number)(value);
}

/** Maps data to pixels, linear or logarithmic. */
export function makeScale(domain, range, log = false) {
  const map = log ? Math.log10 : (v) => v;
  const back = log ? (v) => 10 ** v : (v) => v;
  const [a, b] = domain.map(map);
  const size = b - a || 1;
  const [low, high] = range;
  return {
    domain,
    range,
    log,
    at: (value) => low + ((map(value) - a) / size) * (high - low),
    invert: (pixel) => back(a + ((pixel - low) / (high - low || 1)) * size),
  };
}

/** Domain that holds all values with some room; positive where it is logarithmic. */
export function domainOf(values, { log = false, zero = false, room = 0.05 } = {}) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined || !Number.isFinite(value) || (log && value <= 0)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return log ? [1, 10] : [0, 1];
  if (log) return low === high ? [low / 2, high * 2] : [low * (low / high) ** room, high * (high / low) ** room];
  if (zero) low = Math.min(0, low);
  const size = high - low || Math.abs(high) || 1;
  return [zero && low === 0 ? 0 : low - room * size, high + room * size];
}

function niceStep(size, wanted) {
  const rough = size / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map((n) => n * power).find((step) => step >= rough * 0.999) ?? rough;
}

/** Base in which round numbers of a unit are round: GiB are multiples of 2 ** 30, minutes of 60. */
function baseOf(unit, high) {
  if (unit === "bytes") return 1024 ** Math.min(6, Math.max(0, Math.floor(Math.log(Math.max(1, high)) / Math.log(1024))));
  if (unit === "seconds") {
    if (high >= 172800) return 86400;
    if (high >= 7200) return 3600;
    if (high >= 600) return 60;
  }
  return 1;
}

/** Round values on a scale, with their texts. */
export function ticksOf(scale, unit, wanted) {
  const [low, high] = scale.domain;
  if (scale.log && unit === "bytes") {
    const powers = Math.log2(high / low);
    const each = powers > 3 * wanted ? 5 : powers > 2 * wanted ? 2 : 1;
    const values = [];
    for (let n = Math.ceil(Math.log2(low) / each); n * each <= Math.log2(high); n += 1) values.push(2 ** (n * each));
    if (values.length > 1) return values.map((value) => ({ value, text: format(value, unit) }));
  }
  if (scale.log) {
    const values = [];
    const decades = Math.log10(high / low);
    const steps = decades > wanted ? [1] : decades > 2 ? [1, 3] : decades > 0.7 ? [1, 2, 5] : null;
    if (steps) {
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
        for (const step of steps) values.push(step * 10 ** power);
      }
      return values.filter((v) => v >= low && v <= high).map((value) => ({ value, text: format(value, unit) }));
    }
  }
  const base = baseOf(unit, Math.max(Math.abs(low), Math.abs(high)));
  const nice = niceStep((high - low) / base, wanted) * base;
  const step = unit === "integer" ? Math.max(1, Math.ceil(nice)) : nice;
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) {
    ticks.push({ value: n * step, text: format(Math.abs(n) < 1e-9 ? 0 : n * step, unit).replace(/\.0%$/, "%") });
  }
  // Close to each other, far from zero: as many digits as tell neighbours apart.
  const texts = new Set(ticks.map((t) => t.text));
  if (texts.size < ticks.length) for (const t of ticks) t.text = String(Number(t.value.toPrecision(8)));
  return ticks;
}
