// Charts of lines, points and areas: drag to zoom, double-click to reset, hover to read, click to select, keys for all.

import { chosenAxis } from "./axis.js";
import { colourOf, element, hideTip, legendItem, onWidth, placeIn, plotOf, shape, showTip } from "./dom.js";
import { domainOf, format, makeScale, ticksOf } from "./scale.js";

const MARGIN = { top: 26, right: 16, bottom: 46, left: 76 };
const NEAR = 24;
/** Points of a chart up to which each carries its name. */
const NAMED = 12;
const MARKERS = {
  circle: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  square: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
  diamond: (r) => `M0,${-r * 1.3}L${r * 1.3},0L0,${r * 1.3}L${-r * 1.3},0z`,
  triangle: (r) => `M0,${-r * 1.2}L${r * 1.15},${r}L${-r * 1.15},${r}z`,
  cross: (r) => `M${-r},${-r}L${r},${r}M${-r},${r}L${r},${-r}`,
};

/** Exponential moving average with the correction for its beginning, as TensorBoard draws it. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let scale = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value * (1 - weight);
    scale = scale * weight + (1 - weight);
    return sum / scale;
  });
}

/** Lines have at most about 3,000 points: who makes the data thins them (`run_folder.Curve`). */
export class Chart {
  constructor(host, data, store) {
    this.host = host;
    this.store = store;
    this.view = { x: null, y: null };
    this.hidden = new Set();
    this.shown = [];
    this.smoothing = data.smoothing ?? 0;
    this.logs = { x: Boolean(data.x.log), y: Boolean(data.y.log) };
    this.cursor = -1;
    this.#controls(data);
    const label = `${data.title}: chart. Arrow keys move between points, Enter selects, plus and minus zoom, 0 resets`;
    [this.plot, this.spoken] = plotOf(host, "", label);
    this.#listen();
    if (data.link) store.on(data.link, () => this.draw());
    if (data.across) store.on(data.across, () => this.zoomTo(null, this.view.y));
    this.update(data);
    onWidth(this.plot, (width) => {
      this.width = width;
      this.draw();
    });
  }

  /** Takes new data; what is zoomed, hidden and smoothed stays. */
  update(data) {
    this.data = data;
    this.legend.replaceChildren(
      ...data.series.filter((series) => series.name).map((series) => {
        const mark = series.style === "points" ? `points ${series.marker}` : series.style;
        const item = legendItem(series.name, series.colour, { mark });
        return element(
          "button",
          {
            type: "button", class: "legend-button", "aria-pressed": String(!this.hidden.has(series.name)),
            onclick: (event) => {
              if (!this.hidden.delete(series.name)) this.hidden.add(series.name);
              event.currentTarget.setAttribute("aria-pressed", String(!this.hidden.has(series.name)));
              this.draw();
            },
          },
          item,
        );
      }),
    );
    if (this.width) this.draw();
  }

  #controls(data) {
    this.legend = element("div", { class: "legend" });
    this.reset = element("button", { type: "button", class: "quiet", text: "Reset zoom", onclick: () => this.zoomTo(null, null) });
    this.reset.hidden = true;
    const toggles = ["x", "y"]
      .filter((axis) => data[axis].toggle)
      .map((axis) =>
        element("button", {
          type: "button", class: "quiet", "aria-pressed": String(this.logs[axis]), text: `log ${axis}`,
          onclick: (event) => {
            this.logs[axis] = !this.logs[axis];
            event.currentTarget.setAttribute("aria-pressed", String(this.logs[axis]));
            this.view[axis] = null;
            this.draw();
          },
        }),
      );
    const smooth =
      data.smoothing === null || data.smoothing === undefined
        ? null
        : element(
            "label",
            { class: "smooth" },
            "smoothing",
            element("input", {
              type: "range", min: 0, max: 0.99, step: 0.01, value: this.smoothing,
              oninput: (event) => {
                this.smoothing = Number(event.target.value);
                this.draw();
              },
            }),
          );
    this.host.append(element("div", { class: "chart-tools" }, this.legend, smooth, ...toggles, this.reset));
  }

  /** Series that are not hidden, on the axis that the reader has chosen. */
  #placeSeries() {
    const { axis, place } = chosenAxis(this.data, this.store);
    this.axis = axis;
    this.place = place;
    const seen = this.data.series.filter((series) => !this.hidden.has(series.name));
    this.shown = axis === this.data.x ? seen : seen.map((series) => ({ ...series, steps: series.x, x: series.x.map((step) => place(series.run, step)) }));
  }

  get lines() {
    return this.data.series[0]?.style !== "points";
  }

  zoomTo(x, y) {
    this.view = { x, y };
    this.reset.hidden = x === null && y === null;
    this.draw();
  }

  /** Domains of the axes: as zoomed, or of all that is shown. */
  #domains(values) {
    const { y } = this.data;
    const x = this.axis;
    const xs = this.shown.flatMap((series) => series.x);
    const limits = (axis) => (this.data.marks ?? []).filter((m) => m.axis === axis && m.fit).map((m) => this.#valueOf(m));
    const domain = { x: this.view.x ?? domainOf([...xs, ...limits("x")], { log: this.logs.x, zero: x.zero, room: this.lines ? 0 : 0.06 }) };
    if (this.view.y) return { ...domain, y: this.view.y };
    const [low, high] = domain.x;
    const seen = this.shown.flatMap((series, i) => values[i].filter((_, j) => series.x[j] >= low && series.x[j] <= high));
    const top = this.logs.y ? null : y.top ?? null;
    const fitted = top === null ? seen : seen.filter((value) => value === null || value <= top);
    domain.y = domainOf([...fitted, ...limits("y")], { log: this.logs.y, zero: y.zero, room: 0.08 });
    return domain;
  }

  draw() {
    const { data, width } = this;
    if (!width) return;
    this.#placeSeries();
    const height = Math.max(180, Math.min(data.height, Math.max(320, width * 0.8)));
    const narrow = width < 520;
    const margin = { ...MARGIN, left: narrow ? 60 : MARGIN.left };
    const values = this.shown.map((series) => smoothed(series.y, series.style === "points" ? 0 : this.smoothing));
    const domain = this.#domains(values);
    const right = width - margin.right;
    const bottom = height - margin.bottom;
    this.x = makeScale(domain.x, [margin.left, right], this.logs.x);
    this.y = makeScale(domain.y, [bottom, margin.top], this.logs.y);
    this.box = { left: margin.left, right, top: margin.top, bottom };
    const clip = `clip-${Math.random().toString(36).slice(2)}`;
    const picture = shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
    picture.append(
      shape("clipPath", { id: clip }, shape("rect", { x: margin.left, y: margin.top - 2, width: right - margin.left + 7, height: bottom - margin.top + 4 })),
      this.#axes(data, narrow),
    );
    const inside = shape("g", { "clip-path": `url(#${clip})` });
    this.points = [];
    this.named = [];
    const order = this.shown.map((_, i) => i).sort((a, b) => Number(Boolean(this.shown[b].under)) - Number(Boolean(this.shown[a].under)));
    for (const i of order) this.#series(inside, this.shown[i], values[i]);
    this.#names(inside);
    picture.append(inside, this.#marks(data.marks ?? []));
    this.overlay = shape("g", {});
    picture.append(this.overlay);
    this.#selected();
    this.plot.replaceChildren(picture);
  }

  #axes(data, narrow) {
    const { left, right, top, bottom } = this.box;
    const group = shape("g", { class: "axes" });
    for (const tick of ticksOf(this.x, this.axis.unit, narrow ? 3 : Math.max(3, Math.floor((right - left) / 110)))) {
      const x = this.x.at(tick.value);
      group.append(shape("line", { x1: x, x2: x, y1: top, y2: bottom, class: "grid" }));
      group.append(shape("text", { x, y: bottom + 18, "text-anchor": "middle", text: tick.text }));
    }
    for (const tick of ticksOf(this.y, data.y.unit, Math.max(3, Math.floor((bottom - top) / 50)))) {
      const y = this.y.at(tick.value);
      group.append(shape("line", { x1: left, x2: right, y1: y, y2: y, class: "grid" }));
      group.append(shape("text", { x: left - 8, y: y + 4, "text-anchor": "end", text: tick.text }));
    }
    group.append(shape("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "base" }));
    group.append(shape("text", { x: right, y: bottom + 38, "text-anchor": "end", class: "axis-name", text: this.axis.label }));
    group.append(shape("text", { x: 2, y: top - 12, class: "axis-name", text: data.y.label }));
    return group;
  }

  #series(group, series, values) {
    const points = [];
    for (let i = 0; i < series.x.length; i += 1) {
      const y = values[i];
      if (y === null || (this.logs.y && y <= 0) || (this.logs.x && series.x[i] <= 0)) continue;
      points.push([series.x[i], y, i]);
    }
    if (series.style === "points") {
      const path = MARKERS[series.marker] ?? MARKERS.circle;
      const r = points.length > 400 ? 3.2 : 4.6;
      const named = this.shown.reduce((n, s) => n + (s.style === "points" ? (s.keys ?? []).length || NAMED : 0), 0) <= NAMED;
      for (const [x, y, i] of points) {
        const px = this.x.at(x);
        const py = this.y.at(y);
        group.append(
          shape("path", {
            d: path(r), transform: `translate(${px.toFixed(1)},${py.toFixed(1)})`, class: "point",
            "data-key": series.keys?.[i],
            style: series.marker === "cross"
              ? { stroke: colourOf(series.colour), fill: "none" }
              : { fill: colourOf(series.colour) },
          }),
        );
        this.points.push({ px, py, series, i, key: series.keys?.[i] });
      }
      if (named) this.named.push(...points.map(([x, y, i]) => [this.x.at(x), this.y.at(y), series.tips?.[i]?.split("\n")[0]]));
      return;
    }
    let d = "";
    points.forEach(([x, y], n) => {
      const px = this.x.at(x).toFixed(1);
      const py = this.y.at(y).toFixed(1);
      d += n === 0 ? `M${px},${py}` : series.style === "step" || series.style === "area" ? `H${px}V${py}` : `L${px},${py}`;
    });
    if (series.style === "area" && points.length) {
      const end = `${d}V${this.box.bottom}H${this.x.at(points[0][0]).toFixed(1)}Z`;
      group.append(shape("path", { d: end, class: "area", style: { fill: colourOf(series.colour) } }));
    }
    group.append(shape("path", { d, class: `line ${series.dashed ? "dashed" : ""}`, style: { stroke: colourOf(series.colour) } }));
    for (const [x, y, i] of points) this.points.push({ px: this.x.at(x), py: this.y.at(y), series, i, value: y, key: series.keys?.[i] });
  }

  /** Names beside points, where they cover neither a point nor each other; one without room is left to its tip. */
  #names(group) {
    const taken = this.points.filter((p) => p.series.style === "points").map(({ px, py }) => [px - 5, py - 5, px + 5, py + 5]);
    for (const [px, py, text] of this.named) {
      const wide = 7.2 * (text?.length ?? 0);
      const places = [[px + 9, py + 4], [px - 9 - wide, py + 4], [px - wide / 2, py - 10], [px - wide / 2, py + 19]];
      const box = ([x, y]) => [x, y - 10, x + wide, y + 3];
      const free = ([l, t, r, b]) => l >= this.box.left && r <= this.box.right + 8 && t >= this.box.top && taken.every(([x, y, X, Y]) => r < x || l > X || b < y || t > Y);
      const place = text && places.find((at) => free(box(at)));
      if (!place) continue;
      taken.push(box(place));
      group.append(shape("text", { x: place[0], y: place[1], class: "point-name", text }));
    }
  }

  #valueOf(mark) {
    return mark.axis === "x" ? this.place(mark.run, mark.value) : mark.value;
  }

  #marks(marks) {
    const { left, right, top, bottom } = this.box;
    const group = shape("g", { class: "marks" });
    let row = 0;
    for (const mark of marks) {
      const scale = mark.axis === "x" ? this.x : this.y;
      const [low, high] = scale.domain;
      const value = this.#valueOf(mark);
      if (value < low || value > high) continue;
      const at = scale.at(value);
      const line = mark.axis === "x" ? { x1: at, x2: at, y1: top, y2: bottom } : { x1: left, x2: right, y1: at, y2: at };
      group.append(shape("line", { ...line, class: "mark", style: { stroke: colourOf(mark.colour) } }));
      const late = mark.axis === "x" && at > (left + right) / 2;
      const place = mark.axis === "x"
        ? { x: at + (late ? -5 : 5), y: top + 12 + 14 * (row++ % 3), "text-anchor": late ? "end" : "start" }
        : { x: right - 4, y: row++ % 2 ? at - 6 : at + 15, "text-anchor": "end" };
      group.append(shape("text", { ...place, class: "mark-name", style: { fill: colourOf(mark.colour) }, text: mark.label }));
    }
    return group;
  }

  #selected() {
    if (!this.data.link) return;
    this.store.selected(this.data.link).forEach((key, n) => {
      const point = this.points.find((p) => p.key === key);
      if (!point) return;
      this.overlay.append(
        shape("circle", { cx: point.px, cy: point.py, r: 10, class: "ring" }),
        shape("text", { x: point.px, y: point.py - 15, class: "ring-name", "text-anchor": "middle", text: "AB"[n] ?? "" }),
      );
    });
  }

  #nearest(px, py) {
    let best = null;
    let least = NEAR * NEAR;
    for (const point of this.points) {
      if (point.series.style !== "points") continue;
      const distance = (point.px - px) ** 2 + (point.py - py) ** 2;
      if (distance < least) {
        least = distance;
        best = point;
      }
    }
    return best;
  }

  /** Lines of text about a point, or about all lines at its place. */
  #describe(point) {
    const { y } = this.data;
    const x = this.axis;
    const { series, i } = point;
    const step = series.steps ? [[this.data.x.label, format(series.steps[i], this.data.x.unit)]] : [];
    if (series.style === "points" || series.tips?.length) {
      const [title, ...more] = (series.tips?.[i] ?? series.name).split("\n");
      return [title, ...step, [x.label, format(series.x[i], x.unit)], [y.label, format(series.y[i], y.unit)], ...more];
    }
    const at = series.x[i];
    const rows = this.shown.filter((s) => s.style !== "points").map((s) => {
      const near = this.points.filter((p) => p.series === s).reduce((a, b) => (a && Math.abs(a.px - point.px) <= Math.abs(b.px - point.px) ? a : b), null);
      return near ? [s.name || y.label, format(near.value, y.unit), s.colour] : null;
    });
    return [`${x.label} ${format(at, x.unit)}`, ...step, ...rows.filter(Boolean)];
  }

  #find(px, py) {
    if (!this.lines) return this.#nearest(px, py);
    const { left, right } = this.box;
    if (px < left - 4 || px > right + 4) return null;
    const exact = this.points.filter((p) => p.series.style === "points").find((p) => (p.px - px) ** 2 + (p.py - py) ** 2 < 100);
    if (exact) return exact;
    return this.points.reduce((a, b) => (a && Math.hypot(a.px - px, (a.py - py) / 50) <= Math.hypot(b.px - px, (b.py - py) / 50) ? a : b), null);
  }

  #hover(point) {
    this.overlay.querySelectorAll(".cursor").forEach((node) => node.remove());
    if (!point) return;
    if (point.series.style !== "points") {
      this.overlay.append(shape("line", { x1: point.px, x2: point.px, y1: this.box.top, y2: this.box.bottom, class: "cursor cursor-line" }));
    }
    this.overlay.append(shape("circle", { cx: point.px, cy: point.py, r: 7, class: "cursor cursor-ring" }));
  }

  #listen() {
    let from = null;
    this.plot.addEventListener("pointerdown", (event) => {
      if (event.button === 0 && event.pointerType !== "touch") from = placeIn(this.plot, event);
    });
    this.plot.addEventListener("pointermove", (event) => {
      const [px, py] = placeIn(this.plot, event);
      if (from && Math.hypot(px - from[0], py - from[1]) > 6) return this.#brush(from, [px, py]);
      const point = this.#find(px, py);
      this.#hover(point);
      this.plot.classList.toggle("pointing", Boolean(point?.key));
      if (point) showTip(this.#describe(point), event.clientX, event.clientY);
      else hideTip();
    });
    this.plot.addEventListener("pointerleave", () => {
      from = null;
      this.#hover(null);
      this.overlay.querySelector(".brush")?.remove();
      hideTip();
    });
    this.plot.addEventListener("pointerup", (event) => {
      const to = placeIn(this.plot, event);
      const start = from;
      from = null;
      if (start && Math.hypot(to[0] - start[0], to[1] - start[1]) > 6) return this.#zoomBox(start, to);
      const point = this.#find(...to);
      if (point?.key && this.data.link) this.store.select(this.data.link, point.key);
    });
    this.plot.addEventListener("dblclick", () => this.zoomTo(null, null));
    this.plot.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && document.activeElement !== this.plot) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 0.8 : 1.25, this.x.invert(placeIn(this.plot, event)[0]), this.y.invert(placeIn(this.plot, event)[1]));
    }, { passive: false });
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    this.plot.addEventListener("blur", () => hideTip());
  }

  #brush(from, to) {
    this.overlay.querySelector(".brush")?.remove();
    hideTip();
    const { top, bottom } = this.box;
    const [y1, y2] = this.lines ? [top, bottom] : [Math.min(from[1], to[1]), Math.max(from[1], to[1])];
    this.overlay.append(shape("rect", { class: "brush", x: Math.min(from[0], to[0]), y: y1, width: Math.abs(to[0] - from[0]), height: y2 - y1 }));
  }

  #zoomBox(from, to) {
    const along = (scale, a, b) => {
      const pair = [scale.invert(a), scale.invert(b)];
      return pair[0] < pair[1] ? pair : pair.reverse();
    };
    this.zoomTo(along(this.x, from[0], to[0]), this.lines ? null : along(this.y, from[1], to[1]));
  }

  /** Zooms both axes by a factor around a point; lines along x alone. */
  zoom(factor, x, y) {
    const around = (scale, centre) => {
      const [map, back] = scale.log ? [Math.log10, (v) => 10 ** v] : [(v) => v, (v) => v];
      return scale.domain.map((end) => back(map(centre) + (map(end) - map(centre)) * factor));
    };
    this.zoomTo(around(this.x, x), this.lines ? this.view.y : around(this.y, y));
  }

  #pan(dx, dy) {
    const moved = (scale, part) => {
      const [low, high] = scale.range;
      const by = part * (high - low);
      return [scale.invert(low + by), scale.invert(high + by)];
    };
    this.zoomTo(moved(this.x, dx), this.lines ? this.view.y : moved(this.y, dy));
  }

  #key(event) {
    const centre = [(this.box.left + this.box.right) / 2, (this.box.top + this.box.bottom) / 2];
    const middle = [this.x.invert(centre[0]), this.y.invert(centre[1])];
    const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
    if (event.key === "+" || event.key === "=") this.zoom(0.7, ...middle);
    else if (event.key === "-") this.zoom(1 / 0.7, ...middle);
    else if (event.key === "0" || event.key === "Escape") this.zoomTo(null, null);
    else if (event.shiftKey && arrows[event.key]) this.#pan(0.2 * arrows[event.key][0], 0.2 * arrows[event.key][1]);
    else if (arrows[event.key]) this.#step(arrows[event.key][0] + arrows[event.key][1]);
    else if (event.key === "Enter" && this.focused?.key && this.data.link) this.store.select(this.data.link, this.focused.key);
    else return;
    event.preventDefault();
  }

  #step(by) {
    const order = this.points.filter((p) => (this.lines || p.series.style === "points") && p.px >= this.box.left - 1 && p.px <= this.box.right + 1).sort((a, b) => a.px - b.px || a.py - b.py);
    if (!order.length) return;
    this.cursor = Math.min(order.length - 1, Math.max(0, this.cursor + by));
    this.focused = order[this.cursor];
    this.#hover(this.focused);
    const lines = this.#describe(this.focused);
    const box = this.plot.getBoundingClientRect();
    this.spoken.textContent = showTip(lines, box.left + this.focused.px, box.top + this.focused.py);
  }
}
