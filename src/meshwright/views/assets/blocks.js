// Smaller parts of a page: texts, figures, facts, stacked bars, matrices, findings, and what is known of a selection.

import { breakable, colourOf, element, hideTip, legendItem, showTip } from "./dom.js";
import { format } from "./scale.js";

export function mountText(host, data) {
  host.append(...data.paragraphs.map((text) => element("p", { class: `prose ${data.tone}`, text })));
}

/** Large figures in a row: what a reader wants first. */
export function mountFigures(host, data) {
  host.classList.add("figures");
  host.append(
    ...data.items.map((item) =>
      element(
        "div",
        { class: `figure-item ${item.tone}` },
        element("div", { class: "figure-label", text: item.label }),
        element("div", { class: "figure-value", text: item.value }),
        item.detail ? element("div", { class: "figure-detail", text: item.detail }) : null,
      ),
    ),
  );
}

export function mountFacts(host, data) {
  host.append(
    element("dl", { class: "facts" }, ...data.rows.flatMap(([name, value]) => [element("dt", { text: name }), element("dd", { text: value })])),
  );
}

export function mountCode(host, data) {
  host.append(element("pre", { tabindex: 0, role: "region", "aria-label": data.title || "text" }, element("code", { text: data.text })));
}

function part(value, name, colour, unit, whole) {
  const share = whole > 0 ? value / whole : 0;
  const tip = (event) => showTip([name, [format(value, unit), format(share, "fraction"), colour]], event.clientX, event.clientY);
  return element("div", {
    class: `bar-part ${name.startsWith("exposed") ? "hatch" : ""}`, onpointermove: tip, onpointerleave: hideTip,
    style: { "flex-grow": whole > 0 ? 1000 * share : 0, "--swatch": colourOf(colour) },
    "data-name": name,
  });
}

/** One bar of parts, as long as its part of `most`. limit: where a line is drawn. */
function stack(values, names, colours, unit, most, limit) {
  const whole = values.reduce((a, b) => a + b, 0);
  const text = names.map((name, i) => (values[i] > 0 ? `${name} ${format(values[i], unit)}` : "")).filter(Boolean).join(", ");
  const bar = element("div", { class: "bar-fill", style: { width: `${(100 * whole) / most}%` } });
  bar.append(...values.map((value, i) => (value > 0 ? part(value, names[i], colours[i], unit, whole) : null)).filter(Boolean));
  const line = limit ? element("div", { class: "bar-limit", style: { left: `${(100 * limit) / most}%` }, title: `limit ${format(limit, unit)}` }) : null;
  return element("div", { class: "bar-track", role: "img", "aria-label": text }, bar, line);
}

/** Stacked bars on one scale, and a legend of their parts. text: value beside the name of a part. */
function stacks(rows, data, text) {
  const sums = rows.map((row) => row.values.reduce((a, b) => a + b, 0));
  const most = Math.max(...sums, data.limit ?? 0, 1e-300);
  const legend = element("div", { class: "legend" });
  data.names.forEach((name, i) => {
    if (rows.every((row) => !(row.values[i] > 0))) return;
    legend.append(legendItem(name, data.colours[i]));
    if (text(i)) legend.lastChild.append(element("b", { text: text(i) }));
  });
  const bars = rows.flatMap((row, n) => [
    element("div", { class: "bar-name", text: row.label }),
    stack(row.values, data.names, data.colours, data.unit, most, data.limit),
    element("div", { class: "bar-sum", text: format(sums[n], data.unit) }),
  ]);
  return [element("div", { class: "bars" }, ...bars), legend];
}

/** Stacked bars, one below the other, on one scale. */
export function mountBars(host, data) {
  const whole = data.rows[data.legend_row ?? -1]?.values; // of the row that stands for all
  host.append(...stacks(data.rows, data, (i) => (whole?.[i] ? format(whole[i], data.unit) : "")));
  if (data.limit) host.lastChild.append(legendItem("limit", "limit", { mark: "mark-line" }));
}

/** Findings, the worst first: what, where, why, and what mends it. */
export function mountFindings(host, data) {
  host.append(...data.items.map((item) =>
    element("article", { class: `finding ${item.tone}` },
      element("header", {}, element("b", { text: item.name }), " ", element("span", { text: item.subject }), item.size ? element("span", { class: "badge", text: item.size }) : null),
      item.line ? element("code", { text: item.line }) : null,
      element("p", { text: item.reason }),
      item.fix ? element("p", { class: "fix" }, element("b", { text: "Fix " }), item.fix) : null,
    )));
}

/** What is known of the selected keys; two beside each other, with their difference. */
export class Inspector {
  constructor(host, data, store) {
    this.host = host;
    this.store = store;
    this.data = data;
    store.limit(data.link, data.at_most);
    store.on(data.link, () => this.draw());
    if (data.first && !store.get(data.link)) store.set(data.link, data.first);
    this.update(data);
  }

  update(data) {
    this.data = data;
    this.draw();
  }

  draw() {
    const { data } = this;
    const keys = this.store.selected(data.link).filter((key) => key in data.items);
    const items = keys.map((key) => data.items[key]);
    if (!items.length) {
      this.host.replaceChildren(...this.#title(data.title), element("p", { class: "hint", text: data.empty }));
      return;
    }
    const heads = items.map((item, i) =>
      element("div", { class: "inspected-head" },
        element("h4", {}, items.length > 1 ? element("span", { class: "badge", text: "AB"[i] ?? i + 1 }) : null, item.title),
        item.text ? element("p", { text: item.text }) : null,
        element("button", { type: "button", class: "quiet", text: "Clear", "aria-label": `Clear ${item.title}`, onclick: () => this.store.select(data.link, keys[i]) })));
    this.host.replaceChildren(
      ...this.#title(items.length > 1 ? `${data.title}: ${items.length} side by side` : data.title),
      element("div", { class: "inspected", "data-count": items.length }, ...heads),
      ...data.bars.map((bars, b) => this.#bars(bars, b, items)),
      this.#facts(items),
    );
  }

  #title(text) {
    return text ? [element("h3", { text })] : [];
  }

  #bars(bars, b, items) {
    const values = items.map((item) => item.values[b] ?? []);
    if (!values.some((v) => v.length)) return element("div");
    const rows = items.map((item, i) => ({ label: items.length > 1 ? "AB"[i] : "", values: values[i] }));
    return element("div", { class: "inspected-bars" },
      element("h4", { class: "small", text: bars.title }),
      ...stacks(rows, bars, (i) => ` ${values.map((v) => format(v[i] ?? 0, bars.unit)).join(" | ")}`));
  }

  #facts(items) {
    const rows = this.data.columns.map(({ heading: name, unit }, n) => {
      const cells = items.map((item) => item.facts[n]);
      if (cells.every((cell) => cell === null || cell === undefined || cell === "")) return null;
      const differ = items.length > 1 && cells[0] !== cells[1];
      const numbers = differ && cells.every((cell) => typeof cell === "number") && cells[0] !== 0;
      return element("tr", { class: differ ? "differs" : undefined },
        element("th", { scope: "row", text: name }),
        ...cells.map((cell) => element("td", { class: typeof cell === "number" ? "number" : "text", text: format(cell, unit) })),
        items.length > 1 ? element("td", { class: "number ratio", text: numbers ? `× ${format(cells[1] / cells[0])}` : "" }) : null);
    });
    return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "facts of the selection" },
      element("table", { class: "fact-table" }, element("tbody", {}, ...rows.filter(Boolean))));
  }
}
