// Elements are made of names, attributes and text; nothing is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else if (name === "style") for (const [property, v] of Object.entries(value)) node.style.setProperty(property, v);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Makes an element. attributes: names and values; `text`, `style` as an object, and `onclick` and its like. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Text that may break where the parts of a long name meet: `stage=4,fsdp=2`, `data+fsdp`, `jit(f)/while/body`; not in `16,384`. */
export function breakable(text) {
  return text.split(/(?<=[+/_])(?=[\w(])|(?<=,)(?=\w)(?!(?<=\d,)\d{3}(?!\d))/).flatMap((part, i) => (i ? [element("wbr"), part] : [part]));
}

/** Makes an SVG element. */
export function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Calls `draw(width)` now and whenever the element's width changes. */
export function onWidth(host, draw) {
  let last = 0;
  const observer = new ResizeObserver(() => {
    const width = Math.floor(host.clientWidth);
    if (width > 0 && width !== last) {
      last = width;
      draw(width);
    }
  });
  observer.observe(host);
  return observer;
}

/** Colour of a series or a kind of work: `c3`, `matmul`, `limit` name variables of the style sheet. */
export function colourOf(name) {
  return `var(--${name})`;
}

/** Value of a colour, for a canvas. */
export function colourValue(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "#888";
}

/** Calls `draw` whenever the page's colours change. */
export function onTheme(draw) {
  document.addEventListener("themechange", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

/** Black or white, whichever is readable on a colour `#rrggbb`. */
export function inkOn(colour) {
  const [r, g, b] = [1, 3, 5]
    .map((i) => parseInt(colour.slice(i, i + 2), 16) / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? "#10131a" : "#ffffff";
}

let tip = null;

/** Part of a drawing that takes keys, and what a screen reader says of it. */
export function plotOf(host, kind, label, ...children) {
  const plot = element("div", { class: `plot ${kind}`.trim(), tabindex: 0, role: "group", "aria-label": label }, ...children);
  const spoken = element("div", { class: "visually-hidden", "aria-live": "polite" });
  host.append(plot, spoken);
  return [plot, spoken];
}

/** Place of the pointer in an element. */
export function placeIn(node, event) {
  const box = node.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

/** Shows lines of text beside the pointer, and returns them as one. lines: strings, or [name, value] or [name, value, colour]. */
export function showTip(lines, x, y) {
  if (!tip) {
    tip = element("div", { class: "tip", role: "status" });
    document.body.append(tip);
  }
  tip.replaceChildren(
    ...lines.map((line, i) => {
      if (typeof line === "string") return element("div", { class: i ? "tip-text" : "tip-title", text: line });
      const [name, value, colour] = line;
      const swatch = colour ? element("i", { class: "swatch", style: { background: colourOf(colour) } }) : null;
      return element("div", { class: "tip-row" }, element("span", {}, swatch, name), element("b", { text: value }));
    }),
  );
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 16 + width > innerWidth ? Math.max(4, x - width - 12) : x + 16;
  const top = y + 16 + height > innerHeight ? Math.max(4, y - height - 12) : y + 16;
  tip.style.setProperty("transform", `translate(${Math.round(left)}px, ${Math.round(top)}px)`);
  return lines.map((line) => (typeof line === "string" ? line : `${line[0]} ${line[1]}`)).join(", ");
}

export function hideTip() {
  if (tip) tip.hidden = true;
}

/** A round colour mark with a name. */
export function legendItem(name, colour, extra = {}) {
  return element(
    "span",
    { class: "legend-item" },
    element("i", { class: `swatch ${extra.mark ?? ""}`, style: { "--swatch": colourOf(colour) } }),
    name,
  );
}
