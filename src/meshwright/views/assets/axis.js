// Choice of the x axis of a page's charts: the steps of their data, or what each run had at a step (tokens, time).

import { element } from "./dom.js";

/** Link of a choice -> its data: `axes`, the first of them that of the charts' own data, and `scales` by axis and run. */
const choices = new Map();

/** Value of a scale at a step: linear between its points, and that of the nearest end outside of them. */
export function valueAt(scale, step) {
  const { steps, values } = scale;
  let low = 0;
  let high = steps.length - 1;
  if (step <= steps[low]) return values[low];
  if (step >= steps[high]) return values[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  const part = (step - steps[low]) / (steps[high] - steps[low] || 1);
  return values[low] + part * (values[high] - values[low]);
}

/** Axis that the reader has chosen for a chart, and the function that places a step of a run on it. */
export function chosenAxis(chart, store) {
  const choice = choices.get(chart.across);
  const axis = choice?.axes.slice(1).find((each) => each.label === store.get(chart.across));
  if (!axis) return { axis: chart.x, place: (run, step) => step };
  const scales = choice.scales[axis.label];
  return { axis, place: (run, step) => valueAt(scales[run], step) };
}

/** Buttons, one for each axis. */
export class AxisChoice {
  constructor(host, data, store) {
    this.store = store;
    this.buttons = element("div", { class: "segmented", role: "group", "aria-label": "x axis" });
    host.append(element("div", { class: "chart-tools" }, element("span", { class: "note-inline", text: "x axis" }), this.buttons));
    store.on(data.link, () => this.draw());
    this.update(data);
  }

  update(data) {
    this.data = data;
    choices.set(data.link, data);
    this.draw();
  }

  draw() {
    const { axes, link } = this.data;
    const [first] = axes;
    const chosen = axes.find((axis) => axis.label === this.store.get(link)) ?? first;
    this.buttons.replaceChildren(...axes.map((axis) =>
      element("button", {
        type: "button", class: "quiet", "aria-pressed": String(axis === chosen), text: axis.label,
        onclick: () => this.store.set(link, axis === first ? "" : axis.label),
      })));
  }
}
