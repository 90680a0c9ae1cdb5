"""Solution of problem 16: try first, three hints are free."""

from grading import mistake


def one_f_one_b(stages, microbatches, s):
    ahead = min(stages - s, microbatches)
    order = [("F", m) for m in range(ahead)]
    for m in range(microbatches):
        order.append(("B", m))
        if m + ahead < microbatches:
            order.append(("F", m + ahead))
    return order


def reference(stages, microbatches):
    return [one_f_one_b(stages, microbatches, s) for s in range(stages)]


def best(stages, microbatches):
    """Zero bubble (ZB-H1): as 1F1B, with the W of stage s put off by s microbatches, to fill the ticks at its end."""
    orders = []
    for s in range(stages):
        order, owed = [], []
        for kind, m in one_f_one_b(stages, microbatches, s):
            if kind == "F":
                order.append((kind, m))
                continue
            order.append(("I", m))
            owed.append(m)
            if len(owed) > s:
                order.append(("W", owed.pop(0)))
        orders.append(order + [("W", m) for m in owed])
    return orders


@mistake("memory", "All forward passes come first (GPipe): every stage keeps the inputs of all M microbatches.")
def gpipe(stages, microbatches):
    every = range(microbatches)
    return [[*(("F", m) for m in every), *(("B", m) for m in every)] for _ in range(stages)]


@mistake(
    "time", "One microbatch at a time: P - 1 stages always wait. Start forward passes before the first one is back."
)
def one_at_a_time(stages, microbatches):
    return [[(kind, m) for m in range(microbatches) for kind in "FB"] for _ in range(stages)]


@mistake("result", "The last microbatch never runs: the range ends one too early.")
def one_too_few(stages, microbatches):
    return reference(stages, microbatches - 1)


@mistake(
    "gradient",
    "The backward passes that are left when the forward passes are done are missing: all losses are there, and the "
    "gradient lacks the last microbatches.",
)
def no_cooldown(stages, microbatches):
    left = [min(stages - s, microbatches) - 1 for s in range(stages)]
    orders = reference(stages, microbatches)
    fewest = max(left)
    return [[(k, m) for k, m in order if k == "F" or m < microbatches - fewest] for order in orders]
