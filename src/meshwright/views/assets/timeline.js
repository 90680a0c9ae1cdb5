// Timelines on a canvas: lanes of boxes over time, smooth with hundreds of thousands of them.

import { colourValue, element, hideTip, inkOn, legendItem, onTheme, onWidth, placeIn, plotOf, showTip } from "./dom.js";
import { format, makeScale, ticksOf } from "./scale.js";

const LANE = 30;
const GAP = 6;
const AXIS = 26;
const OVERVIEW = 30;
const MOST = 500000;

/** Repeats the bodies of loops, which come once: boxes of every iteration, as long as there are not too many. */
export function unrolled(spans, most = MOST) {
  const size = spans.start.length;
  const boxes = [];
  let left = most;
  const place = (begin, end, shift, depth, around) => {
    let i = begin;
    while (i < end) {
      let next = i + 1;
      while (next < end && spans.depth[next] > spans.depth[i]) next += 1;
      boxes.push({ span: i, start: spans.start[i] + shift, seconds: spans.seconds[i], depth });
      left -= 1;
      if (next > i + 1) {
        const times = Math.max(1, Math.round(spans.count[i] / around));
        const each = spans.seconds[i] / times;
        // Where a step has more boxes than can be drawn, the first iterations are drawn and the loop's own box stays.
        const fit = Math.max(1, Math.min(times, Math.floor(left / (next - i - 1))));
        for (let n = 0; n < fit; n += 1) place(i + 1, next, shift + n * each, depth + 1, spans.count[i]);
      }
      i = next;
    }
  };
  place(0, size, 0, 0, 1);
  return boxes;
}

/**
 * The step of one device. data.lanes: names. data.kinds: {kind, name, colour}. data.names, data.seconds: of the step.
 * data.spans: a list for each field of the boxes: lane, kind, name (index into data.names), start, seconds, count
 * (executions in the step), depth, exposed, key (for the link; empty selects nothing). A loop comes before its body,
 * which comes once.
 */
export class Timeline {
  constructor(host, data, store) {
    this.store = store;
    this.legend = element("div", { class: "legend" });
    this.reset = element("button", { type: "button", class: "quiet", text: "Reset zoom", onclick: () => this.zoomTo(0, this.data.seconds) });
    this.state = element("span", { class: "found", role: "status" });
    host.append(element("div", { class: "chart-tools" }, this.legend, this.state, this.reset));
    this.canvas = element("canvas");
    const label = `${data.title}: timeline. Arrow keys move between boxes, Shift and arrows pan, plus and minus zoom, 0 resets, Enter selects`;
    [this.plot, this.spoken] = plotOf(host, "timeline", label, this.canvas);
    host.append(element("p", { class: "hint", text: "Drag to zoom, Shift and drag to move, Ctrl and wheel to zoom, double-click to reset." }));
    this.#listen();
    this.update(data);
    onTheme(() => this.#later());
    onWidth(this.plot, (width) => {
      this.width = width;
      this.draw();
    });
    if (data.link) store.on(data.link, () => this.#later());
  }

  update(data) {
    this.data = data;
    this.lanes = null; // boxes are laid out when they are first drawn: a page is ready before
    this.window = [0, data.seconds || 1];
    this.legend.replaceChildren(...data.kinds.map((kind) => legendItem(kind.name, kind.colour)), legendItem("exposed: nothing else runs", "exposed", { mark: "hatch" }));
    if (this.width) this.draw();
  }

  #layOut() {
    const { data } = this;
    this.lanes = data.lanes.map((name) => ({ name, boxes: [] }));
    for (const box of unrolled(data.spans)) {
      const lane = this.lanes[data.spans.lane[box.span]];
      if (lane) lane.boxes.push(box);
    }
    // Loops lie around each other: only the outermost and those directly in it have room in one lane.
    for (const lane of this.lanes) lane.boxes.sort((a, b) => a.start - b.start);
    this.lanes = this.lanes.filter((lane) => lane.boxes.length);
  }

  zoomTo(from, to) {
    const all = this.data.seconds || 1;
    const size = Math.min(all, Math.max(all * 1e-6, to - from));
    const start = Math.min(all - size, Math.max(0, from));
    this.window = [start, start + size];
    this.#later();
  }

  #later() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  get left() {
    return this.width < 560 ? 8 : Math.min(230, this.width * 0.2);
  }

  draw() {
    if (!this.width) return;
    if (!this.lanes) this.#layOut();
    const inline = this.width < 560;
    const laneHeight = inline ? LANE + 15 : LANE;
    const height = AXIS + this.lanes.length * (laneHeight + GAP) + OVERVIEW + 12;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = this.width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.setProperty("width", `${this.width}px`);
    this.canvas.style.setProperty("height", `${height}px`);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, this.width, height);
    this.colours = Object.fromEntries(this.data.kinds.map((kind) => [kind.kind, colourValue(kind.colour)]));
    this.ink = { text: colourValue("ink"), muted: colourValue("muted"), line: colourValue("line"), exposed: colourValue("exposed"), accent: colourValue("accent"), surface: colourValue("surface") };
    this.x = makeScale(this.window, [this.left, this.width - 8]);
    this.#axis(pen, height);
    this.rows = this.lanes.map((lane, n) => {
      const top = AXIS + n * (laneHeight + GAP) + (inline ? 15 : 0);
      this.#lane(pen, lane, top, inline);
      return { lane, top };
    });
    this.#overview(pen, height - OVERVIEW - 2);
    const [from, to] = this.window;
    this.reset.hidden = to - from >= (this.data.seconds || 1) * 0.999;
    this.state.textContent = `${format(to - from, "seconds")} shown`;
  }

  #axis(pen, height) {
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "center";
    for (const tick of ticksOf(this.x, "seconds", Math.max(2, this.width / 140))) {
      const x = this.x.at(tick.value);
      pen.fillStyle = this.ink.line;
      pen.fillRect(Math.round(x), AXIS - 4, 1, height - AXIS - OVERVIEW - 8);
      pen.fillStyle = this.ink.muted;
      const half = pen.measureText(tick.text).width / 2;
      pen.fillText(tick.text, Math.min(this.width - half - 2, Math.max(half, x)), 14);
    }
  }

  #lane(pen, lane, top, inline) {
    const [from, to] = this.window;
    const { spans, names } = this.data;
    const right = this.width - 8;
    pen.fillStyle = this.ink.surface;
    pen.fillRect(this.left, top, right - this.left, LANE);
    pen.fillStyle = this.ink.text;
    pen.textAlign = "left";
    pen.font = "12.5px system-ui, sans-serif";
    pen.fillText(lane.name, inline ? this.left : 0, inline ? top - 4 : top + LANE / 2 + 4, inline ? this.width : this.left - 10);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, top, right - this.left, LANE);
    pen.clip();
    const chosen = new Set(this.data.link ? this.store.selected(this.data.link) : []);
    let drawn = -1;
    for (const box of this.#visible(lane, from, to)) {
      const x = this.x.at(box.start);
      const width = this.x.at(box.start + box.seconds) - x;
      // Boxes narrower than half a pixel in a column that is drawn already would change nothing.
      if (width < 0.5 && x + width < drawn) continue;
      drawn = x + Math.max(0.5, width);
      pen.fillStyle = this.colours[spans.kind[box.span]] ?? "#888";
      pen.fillRect(x, top, Math.max(0.5, width - (width > 4 ? 1 : 0)), LANE);
      const exposed = spans.exposed[box.span];
      if (exposed > 0) this.#exposed(pen, x, width, top, exposed / spans.seconds[box.span]);
      if (chosen.size && chosen.has(spans.key?.[box.span])) {
        pen.strokeStyle = this.ink.text;
        pen.lineWidth = 2;
        pen.strokeRect(x + 1, top + 1, Math.max(2, width - 2), LANE - 2);
      }
      if (width > 34) this.#label(pen, names[spans.name[box.span]], x, width, top, inkOn(this.colours[spans.kind[box.span]] ?? "#888888"));
    }
    pen.restore();
  }

  #exposed(pen, x, width, top, part) {
    const length = Math.max(1, width * Math.min(1, part));
    pen.fillStyle = this.ink.exposed;
    // The wait is at the end of a transfer.
    pen.fillRect(x + width - length, top + LANE - 7, length, 7);
  }

  #label(pen, text, x, width, top, ink) {
    const start = Math.max(x, this.left);
    const room = Math.min(x + width, this.width - 8) - start - 8;
    if (room < 26) return;
    pen.fillStyle = ink;
    pen.font = "11.5px system-ui, sans-serif";
    let shown = text;
    while (shown.length > 2 && pen.measureText(shown).width > room) shown = `${shown.slice(0, Math.max(1, Math.floor(shown.length * 0.8) - 1))}…`;
    if (shown.length > 2) pen.fillText(shown, start + 4, top + LANE / 2 + 4);
  }

  *#visible(lane, from, to) {
    const { boxes } = lane;
    let low = 0;
    let high = boxes.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (boxes[middle].start + boxes[middle].seconds < from) low = middle + 1;
      else high = middle;
    }
    for (let i = Math.max(0, low - 1); i < boxes.length && boxes[i].start <= to; i += 1) if (boxes[i].start + boxes[i].seconds >= from) yield boxes[i];
  }

  /** The whole step, small, with the window that is shown. */
  #overview(pen, top) {
    const all = makeScale([0, this.data.seconds || 1], [this.left, this.width - 8]);
    const each = (OVERVIEW - 4) / this.lanes.length;
    this.overview = { top, scale: all };
    this.lanes.forEach((lane, n) => {
      let drawn = -1;
      for (const box of lane.boxes) {
        const x = all.at(box.start);
        const end = all.at(box.start + box.seconds);
        if (end < drawn + 0.5) continue;
        drawn = end;
        pen.fillStyle = this.colours[this.data.spans.kind[box.span]] ?? "#888";
        pen.fillRect(x, top + 2 + n * each, Math.max(0.5, end - x), Math.max(1, each - 1));
      }
    });
    const [from, to] = this.window.map(all.at);
    pen.strokeStyle = this.ink.accent;
    pen.lineWidth = 2;
    pen.strokeRect(from, top, Math.max(2, to - from), OVERVIEW);
  }

  #find(px, py) {
    const row = this.rows?.find(({ top }) => py >= top && py <= top + LANE);
    if (!row || px < this.left) return null;
    const slack = (this.window[1] - this.window[0]) / this.width;
    const time = this.x.invert(px);
    let best = null;
    for (const box of this.#visible(row.lane, time - slack, time + slack)) {
      if (!best || box.depth > best.depth || box.seconds < best.seconds) best = box;
    }
    return best;
  }

  #describe(box) {
    const { spans, names, kinds } = this.data;
    const i = box.span;
    const kind = kinds.find((k) => k.kind === spans.kind[i]);
    const lines = [names[spans.name[i]], [kind?.name ?? "", format(spans.seconds[i], "seconds"), kind?.colour], ["starts at", format(box.start, "seconds")]];
    if (spans.exposed[i] > 0) lines.push(["exposed", format(spans.exposed[i], "seconds"), "exposed"]);
    if (spans.count[i] > 1) lines.push(["executions in a step", format(spans.count[i], "integer")]);
    if (spans.key?.[i]) lines.push("click for its tensor, payload and source line");
    return lines;
  }

  #listen() {
    let from = null;
    this.plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      const [px, py] = placeIn(this.plot, event);
      const onOverview = this.overview && py >= this.overview.top;
      from = { px, py, window: this.window, mode: onOverview ? "overview" : event.shiftKey || event.pointerType === "touch" ? "pan" : "zoom" };
      if (onOverview) this.#centre(px);
      this.plot.setPointerCapture(event.pointerId);
    });
    this.plot.addEventListener("pointermove", (event) => {
      const [px, py] = placeIn(this.plot, event);
      if (from?.mode === "overview") return this.#centre(px);
      if (from && Math.abs(px - from.px) > 4) {
        hideTip();
        if (from.mode === "pan") {
          const by = ((from.px - px) / (this.width - this.left - 8)) * (from.window[1] - from.window[0]);
          return this.zoomTo(from.window[0] + by, from.window[1] + by);
        }
        return this.#band(from.px, px);
      }
      const box = this.#find(px, py);
      if (box) showTip(this.#describe(box), event.clientX, event.clientY);
      else hideTip();
    });
    this.plot.addEventListener("pointerup", (event) => {
      const start = from;
      from = null;
      const [px, py] = placeIn(this.plot, event);
      this.band?.remove();
      this.band = null;
      if (!start || start.mode === "overview") return;
      if (Math.abs(px - start.px) > 4) {
        if (start.mode === "zoom") this.zoomTo(...[this.x.invert(start.px), this.x.invert(px)].sort((a, b) => a - b));
        return;
      }
      this.#choose(this.#find(px, py));
    });
    this.plot.addEventListener("pointerleave", () => hideTip());
    this.plot.addEventListener("dblclick", () => this.zoomTo(0, this.data.seconds));
    this.plot.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && document.activeElement !== this.plot) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 0.8 : 1.25, this.x.invert(placeIn(this.plot, event)[0]));
    }, { passive: false });
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    this.plot.addEventListener("blur", () => hideTip());
  }

  #choose(box) {
    const key = box && this.data.spans.key?.[box.span];
    if (key && this.data.link) this.store.select(this.data.link, key);
  }

  #centre(px) {
    const half = (this.window[1] - this.window[0]) / 2;
    const middle = this.overview.scale.invert(px);
    this.zoomTo(middle - half, middle + half);
  }

  #band(a, b) {
    if (!this.band) {
      this.band = element("div", { class: "band" });
      this.plot.append(this.band);
    }
    this.band.style.setProperty("left", `${Math.min(a, b)}px`);
    this.band.style.setProperty("width", `${Math.abs(a - b)}px`);
  }

  zoom(factor, around) {
    const [from, to] = this.window;
    this.zoomTo(around - (around - from) * factor, around + (to - around) * factor);
  }

  #key(event) {
    const [from, to] = this.window;
    const middle = (from + to) / 2;
    const way = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.key === "+" || event.key === "=") this.zoom(0.6, middle);
    else if (event.key === "-") this.zoom(1 / 0.6, middle);
    else if (event.key === "0" || event.key === "Escape") this.zoomTo(0, this.data.seconds);
    else if (way && event.shiftKey) this.zoomTo(from + way * 0.25 * (to - from), to + way * 0.25 * (to - from));
    else if (way && event.key.endsWith("t")) this.#step(way, 0);
    else if (way) this.#step(0, way);
    else if (event.key === "Enter" && this.focused) this.#choose(this.focused);
    else return;
    event.preventDefault();
  }

  /** Moves the focus to the next box of a lane, or to another lane. */
  #step(along, across) {
    const at = Math.max(0, this.lanes.findIndex((lane) => lane.boxes.includes(this.focused)));
    const lane = this.lanes[Math.min(this.lanes.length - 1, Math.max(0, at + across))];
    const seen = [...this.#visible(lane, ...this.window)];
    if (!seen.length) return;
    const place = across || !this.focused ? 0 : Math.min(seen.length - 1, Math.max(0, seen.indexOf(this.focused) + along));
    this.focused = seen[place];
    const lines = this.#describe(this.focused);
    const box = this.plot.getBoundingClientRect();
    const row = this.rows.find((r) => r.lane === lane);
    this.spoken.textContent = showTip(lines, box.left + Math.max(this.left, this.x.at(this.focused.start)), box.top + row.top + LANE);
  }
}
