// Drawings of devices: a mesh over a machine, the blocks of tensors, and the ticks of a pipeline.

import { colourValue, element, hideTip, inkOn, onTheme, onWidth, placeIn, plotOf, showTip } from "./dom.js";
import { format } from "./scale.js";

const PALETTE_SIZE = 8;

function mixed(colour, paper, part) {
  const [a, b] = [colour, paper].map((text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16)));
  return `#${a.map((v, i) => Math.round(v * part + b[i] * (1 - part)).toString(16).padStart(2, "0")).join("")}`;
}

/** Returns the function from a number to its colour: the palette, then lighter turns of it (`views.colours.block_colour`). */
function turnColours() {
  const colours = Array.from({ length: PALETTE_SIZE }, (_, i) => colourValue(`c${i + 1}`));
  const turns = colourValue("turns").split(" ").map(Number);
  const paper = colourValue("card");
  const mixtures = turns.flatMap((turn) => colours.map((colour) => mixed(colour, paper, turn)));
  return (number) => mixtures[number % mixtures.length];
}

/** Position of a device along each axis; devices are numbered with the last axis fastest. */
export function coordinatesOf(device, axes) {
  const at = new Array(axes.length);
  let rest = device;
  for (let i = axes.length - 1; i >= 0; i -= 1) {
    at[i] = rest % axes[i][1];
    rest = Math.floor(rest / axes[i][1]);
  }
  return at;
}

/** Cells in panels on a canvas, with what the pointer is over. */
class CellCanvas {
  constructor(host, label, { onHover, onLeave, draw }) {
    this.canvas = element("canvas");
    [this.plot, this.spoken] = plotOf(host, "cells", label, this.canvas);
    this.cells = [];
    this.cursor = -1;
    this.onLeave = onLeave;
    onTheme(draw);
    onWidth(this.plot, draw);
    this.plot.addEventListener("pointermove", (event) => {
      const cell = this.find(...placeIn(this.canvas, event));
      if (cell) onHover(cell, event.clientX, event.clientY);
      else this.#left();
    });
    this.plot.addEventListener("pointerleave", () => this.#left());
    this.plot.addEventListener("blur", () => this.#left());
    this.plot.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowDown: this.across ?? 1, ArrowLeft: -1, ArrowUp: -(this.across ?? 1) }[event.key];
      if (!by || !this.cells.length) return;
      event.preventDefault();
      this.cursor = Math.min(this.cells.length - 1, Math.max(0, this.cursor + by));
      const cell = this.cells[this.cursor];
      this.plot.scrollTop = cell.y + cell.h / 2 - this.plot.clientHeight / 2; // of a large machine a part is in view
      const box = this.canvas.getBoundingClientRect();
      this.spoken.textContent = onHover(cell, box.left + cell.x + cell.w, box.top + cell.y + cell.h) ?? "";
    });
  }

  get width() {
    return Math.floor(this.plot.clientWidth);
  }

  #left() {
    hideTip();
    this.onLeave();
  }

  /** Makes room for a drawing; returns the pen. */
  begin(width, height) {
    // Browsers draw nothing on a canvas that is longer.
    const ratio = Math.min(devicePixelRatio || 1, 16384 / Math.max(width, height, 1));
    this.canvas.width = Math.max(1, width * ratio);
    this.canvas.height = Math.max(1, height * ratio);
    this.canvas.style.setProperty("width", `${width}px`);
    this.canvas.style.setProperty("height", `${height}px`);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    this.cells = [];
    return pen;
  }

  cell(pen, { x, y, w, h, fill, text, ring, dim, ...rest }) {
    const gap = Math.min(w, h) > 9 ? 1.5 : Math.min(w, h) > 4 ? 0.75 : 0;
    pen.globalAlpha = dim ? 0.25 : 1;
    pen.fillStyle = fill;
    pen.fillRect(x, y, Math.max(0.7, w - gap), Math.max(0.7, h - gap));
    if (ring) {
      pen.lineWidth = Math.min(w, h) > 9 ? 2.4 : 1.2;
      pen.strokeStyle = ring;
      pen.strokeRect(x + 1, y + 1, Math.max(1, w - gap - 2), Math.max(1, h - gap - 2));
    }
    if (text && h > 12) {
      const size = Math.min(h > 34 ? 14 : 12, h * 0.6);
      pen.font = `${size}px system-ui, sans-serif`;
      if (pen.measureText(text).width < w - 5) {
        pen.fillStyle = inkOn(fill);
        pen.textAlign = "center";
        pen.fillText(text, x + (w - gap) / 2, y + (h - gap) / 2 + size * 0.35);
      }
    }
    pen.globalAlpha = 1;
    this.cells.push({ x, y, w, h, ...rest });
  }

  find(px, py) {
    return this.cells.find((cell) => px >= cell.x && px < cell.x + cell.w && py >= cell.y && py < cell.y + cell.h) ?? null;
  }
}

function segmented(label, names, chosen, choose) {
  const buttons = names.map((name, i) =>
    element("button", {
      type: "button", class: "quiet", "aria-pressed": String(i === chosen), text: name,
      onclick: () => {
        buttons.forEach((button, n) => button.setAttribute("aria-pressed", String(n === i)));
        choose(i);
      },
      onpointerenter: () => choose(i, true),
      onpointerleave: () => choose(-1, true),
    }),
  );
  return element("div", { class: "segmented", role: "group", "aria-label": label }, ...buttons);
}

/**
 * Mesh over a torus, nodes or a host: the devices that communicate along an axis have one colour.
 * data.mesh: {axes: name and degree of each axis of several devices, outermost first; summaries: links along each}.
 * data.panels: {caption, rows, columns, cells: device, row and column}, of a node or a plane of a torus.
 * data.meshes: meshes by key of the link, which is shown where it is selected.
 */
export class Machine {
  constructor(host, data, store) {
    this.data = data;
    this.over = -1;
    this.passing = -1;
    this.facts = element("ul", { class: "plain-list" });
    this.tools = element("div", { class: "chart-tools" });
    this.cells = new CellCanvas(host, `${data.title}: devices. Arrow keys move between devices`, {
      onHover: (cell, x, y) => this.#hover(cell.device, x, y),
      onLeave: () => this.#hover(-1),
      draw: () => this.draw(),
    });
    this.cells.plot.before(this.tools, this.facts);
    const choose = () => this.#take(data.meshes[store.selected(data.link).at(-1)] ?? data.mesh);
    if (data.link) store.on(data.link, choose);
    choose();
  }

  /** Shows another mesh on the same machine. */
  #take(mesh) {
    this.axes = mesh.axes;
    this.summaries = mesh.summaries;
    this.axis = mesh.axes.length - 1;
    const names = mesh.axes.map(([name, n]) => `${name} = ${n}`);
    this.tools.replaceChildren(element("span", { class: "found", text: "communicate along" }),
      segmented("mesh axis", names, this.axis, (i, passing) => {
        if (passing) this.passing = i;
        else this.axis = i;
        this.draw();
      }));
    this.facts.replaceChildren(...mesh.summaries.map((text) => element("li", { text })));
    this.draw();
  }

  get shownAxis() {
    return this.passing >= 0 ? this.passing : this.axis;
  }

  /** Number of a device's group: its position along all other axes. */
  #group(device) {
    let number = 0;
    coordinatesOf(device, this.axes).forEach((at, i) => {
      if (i !== this.shownAxis) number = number * this.axes[i][1] + at;
    });
    return number;
  }

  #hover(device, x, y) {
    if (device !== this.over) {
      this.over = device;
      this.draw();
    }
    if (device < 0) return "";
    const { axes, summaries } = this;
    const at = coordinatesOf(device, axes);
    const [name, n] = axes[this.shownAxis] ?? ["", 1];
    const lines = [`device ${device}`, ...axes.map(([axis, size], i) => [axis, `${at[i]} of ${size}`])];
    if (name) lines.push(`${n} devices communicate along ${name}`, summaries[this.shownAxis] ?? "");
    return showTip(lines, x, y);
  }

  draw() {
    const { width } = this.cells;
    if (!width) return;
    const { panels } = this.data;
    const most = panels.reduce((n, p) => Math.max(n, p.columns), 1);
    const devices = panels.reduce((n, p) => n + p.cells.length, 0);
    const wanted = devices <= 16 ? 84 : devices <= 64 ? 46 : devices <= 256 ? 30 : devices <= 2048 ? 18 : 9;
    const side = Math.max(3, Math.min(wanted, (width - 8) / most));
    const gap = panels.length > 1 ? Math.max(12, side) : 0;
    const caption = 6.4 * panels.reduce((n, p) => Math.max(n, p.caption.length), 0); // it may be wider than its panel
    const title = caption > 0 ? 18 : 0;
    const places = [];
    let x = 0;
    let y = 0;
    let tall = 0;
    for (const panel of panels) {
      const w = panel.columns * side;
      const h = panel.rows * side + title;
      const wide = Math.max(w, caption);
      if (x > 0 && x + wide > width) {
        x = 0;
        y += tall + 12;
        tall = 0;
      }
      places.push([x, y]);
      x += wide + gap;
      tall = Math.max(tall, h);
    }
    const pen = this.cells.begin(width, y + tall + 4);
    const colour = turnColours();
    const ink = colourValue("ink");
    const group = this.over >= 0 ? this.#group(this.over) : -1;
    panels.forEach((panel, p) => {
      const [left, top] = places[p];
      if (panel.caption) {
        pen.fillStyle = colourValue("muted");
        pen.font = "11.5px system-ui, sans-serif";
        pen.textAlign = "left";
        pen.fillText(panel.caption, left, top + 12);
      }
      for (const [device, row, column] of panel.cells) {
        const own = this.#group(device);
        this.cells.cell(pen, {
          x: left + column * side, y: top + title + row * side, w: side, h: side, device, text: String(device),
          fill: colour(own), ring: device === this.over || own === group ? ink : "", dim: group >= 0 && own !== group,
        });
      }
    });
    this.cells.across = most;
  }
}

/**
 * Blocks of a tensor and the devices that hold them, sharded or gathered.
 * data.axes: name and degree. data.first: name of the tensor that is shown first. data.tensors: {name, dims, shape,
 * sharded and gathered: for each dimension the axes that split it, as indices into data.axes; sharded_text,
 * gathered_text, bytes_sharded, bytes_gathered: of a device; stacked: whether the first dimension counts layers}.
 */
export class Placement {
  constructor(host, data, store) {
    this.data = data;
    this.store = store;
    this.name = data.id;
    this.over = null;
    const pick = element("select", { id: `pick-${data.id}`, onchange: (event) => this.#choose(Number(event.target.value)) },
      ...data.tensors.map((tensor, i) => element("option", { value: i, text: tensor.name })));
    const slide = element("input", { type: "range", min: 0, max: data.tensors.length - 1, step: 1, "aria-label": "tensor", oninput: (event) => this.#choose(Number(event.target.value)) });
    this.pick = pick;
    this.slide = slide;
    this.states = segmented("placement", ["sharded", "gathered"], 0, (i, passing) => {
      if (!passing) store.set(`${this.name}.use`, i ? "gathered" : "");
    });
    host.append(element("div", { class: "chart-tools" }, element("label", { for: pick.id, class: "found", text: "tensor" }), pick, slide, this.states));
    this.head = element("div", { class: "placement-head" });
    this.grid = element("div", { class: "placement" });
    const left = element("div", {}, element("h3", { class: "small", text: "Blocks of the tensor" }));
    const right = element("div", {}, element("h3", { class: "small", text: "Devices of the mesh" }));
    this.blocks = new CellCanvas(left, "blocks of the tensor; arrow keys move between blocks", { onHover: (c, x, y) => this.#hoverBlock(c, x, y), onLeave: () => this.#mark(null), draw: () => this.draw() });
    this.devices = new CellCanvas(right, "devices of the mesh; arrow keys move between devices", { onHover: (c, x, y) => this.#hoverDevice(c, x, y), onLeave: () => this.#mark(null), draw: () => this.draw() });
    this.grid.append(left, right);
    host.append(this.head, this.grid);
    store.on(`${this.name}.tensor`, () => this.draw());
    store.on(`${this.name}.use`, () => this.draw());
  }

  #choose(i) {
    this.store.set(`${this.name}.tensor`, this.data.tensors[i].name);
  }

  get tensor() {
    const name = this.store.get(`${this.name}.tensor`) || this.data.first;
    return Math.max(0, this.data.tensors.findIndex((t) => t.name === name));
  }

  /** Degrees of the dimensions, and the block of each device. */
  #layout() {
    const tensor = this.data.tensors[this.tensor];
    const gathered = this.store.get(`${this.name}.use`) === "gathered";
    const over = gathered ? tensor.gathered : tensor.sharded;
    const { axes } = this.data;
    const degrees = over.map((names) => names.reduce((n, axis) => n * axes[axis][1], 1));
    const block = (device) => {
      const at = coordinatesOf(device, axes);
      return over.map((names) => names.reduce((index, axis) => index * axes[axis][1] + at[axis], 0));
    };
    return { tensor, gathered, over, degrees, block };
  }

  #number(index, degrees) {
    return index.reduce((n, i, d) => n * degrees[d] + i, 0);
  }

  draw() {
    const layout = this.#layout();
    const { tensor, gathered, degrees } = layout;
    this.pick.value = String(this.tensor);
    this.slide.value = String(this.tensor);
    [...this.states.children].forEach((button, i) => button.setAttribute("aria-pressed", String((i === 1) === gathered)));
    const total = degrees.reduce((a, b) => a * b, 1);
    const copies = this.data.devices / total;
    this.head.replaceChildren(
      element("code", { text: gathered ? tensor.gathered_text : tensor.sharded_text }),
      element("span", { text: `${tensor.shape.join(" × ") || "scalar"}; ${total === 1 ? "whole on every device" : `${total.toLocaleString("en")} blocks of ${tensor.shape.map((n, d) => Math.ceil(n / degrees[d])).join(" × ")}`}${copies > 1 && total > 1 ? `, each on ${copies.toLocaleString("en")} devices` : ""}` }),
      element("b", { text: `${format(gathered ? tensor.bytes_gathered : tensor.bytes_sharded, "bytes")} on a device${gathered && tensor.stacked ? ", one layer at a time" : ""}` }),
    );
    const holders = new Map();
    const blockOf = [];
    for (let device = 0; device < this.data.devices; device += 1) {
      const n = this.#number(layout.block(device), degrees);
      blockOf.push(n);
      if (!holders.has(n)) holders.set(n, []);
      holders.get(n).push(device);
    }
    this.shown = { layout, holders, blockOf };
    this.#drawBlocks();
    this.#drawDevices();
  }

  /** Rows and columns are the two most divided dimensions; panels are the blocks of the others. */
  #drawBlocks() {
    const { width } = this.blocks;
    if (!width) return;
    const { layout: { tensor, degrees, over }, holders } = this.shown;
    const order = degrees.map((n, d) => [n, d]).sort((a, b) => b[0] - a[0] || b[1] - a[1]).slice(0, 2).map(([, d]) => d).sort((a, b) => a - b);
    const across = order.at(-1);
    const down = order.length > 1 ? order[0] : -1;
    const others = degrees.map((_, d) => d).filter((d) => !order.includes(d));
    const panels = others.reduce((n, d) => n * degrees[d], 1);
    const columns = across === undefined ? 1 : degrees[across];
    const rows = down < 0 ? 1 : degrees[down];
    const perRow = Math.min(panels, Math.max(1, Math.floor(width / Math.max(96, columns * 7))));
    const each = (width - 26 - (perRow - 1) * 16) / perRow;
    const ratio = down < 0 ? 0.16 : Math.min(1.1, Math.max(0.35, tensor.shape[down] / tensor.shape[across]));
    const tall = Math.max(30, Math.min(each * ratio, 420, Math.max(rows * 26, 120)));
    const lines = Math.ceil(panels / perRow);
    const pen = this.blocks.begin(width, lines * (tall + 34) + 8);
    const colour = turnColours();
    const name = (d) => `${tensor.dims[d]}${over[d].length ? `/${over[d].map((a) => this.data.axes[a][0]).join("+")}` : ""}`;
    for (let p = 0; p < panels; p += 1) {
      const left = 22 + (p % perRow) * (each + 16);
      const top = 22 + Math.floor(p / perRow) * (tall + 34);
      const fixed = new Array(degrees.length).fill(0);
      let rest = p;
      for (const d of [...others].reverse()) {
        fixed[d] = rest % degrees[d];
        rest = Math.floor(rest / degrees[d]);
      }
      pen.fillStyle = colourValue("muted");
      pen.font = "12px system-ui, sans-serif";
      pen.textAlign = "left";
      const divided = others.filter((d) => degrees[d] > 1).map((d) => `${tensor.dims[d]} ${fixed[d]}`).join(", ");
      pen.fillText(`${across === undefined ? "" : `${name(across)} →`}${divided ? `   ${divided}` : ""}`, left, top - 7);
      if (down >= 0 && p % perRow === 0) {
        pen.save();
        pen.translate(12, top + Math.min(tall, 200));
        pen.rotate(-Math.PI / 2);
        pen.fillText(`← ${name(down)}`, 0, 0);
        pen.restore();
      }
      for (let r = 0; r < rows; r += 1) {
        for (let c = 0; c < columns; c += 1) {
          const index = [...fixed];
          if (across !== undefined) index[across] = c;
          if (down >= 0) index[down] = r;
          const n = this.#number(index, degrees);
          const owners = holders.get(n) ?? [];
          this.blocks.cell(pen, {
            x: left + (c * each) / columns, y: top + (r * tall) / rows, w: each / columns, h: tall / rows, block: n, index,
            fill: colour(n), text: shortList(owners), ring: this.over === n ? colourValue("ink") : "", dim: this.over !== null && this.over !== n,
          });
        }
      }
    }
    this.blocks.across = columns;
  }

  #drawDevices() {
    const { width } = this.devices;
    if (!width) return;
    const { blockOf } = this.shown;
    const count = this.data.devices;
    const inner = this.data.axes.at(-1)?.[1] ?? 1;
    // Rows of whole groups of the innermost axis, or whole parts of one, in about the shape of the screen.
    const aim = Math.sqrt(count * 1.6);
    let columns = inner;
    for (let n = 1; n <= count; n += 1) {
      const whole = n % inner === 0 || inner % n === 0;
      if (whole && count % n === 0 && Math.abs(Math.log(n / aim)) < Math.abs(Math.log(columns / aim))) columns = n;
    }
    const side = Math.max(3, Math.min(44, (width - 2) / columns));
    const pen = this.devices.begin(width, Math.ceil(count / columns) * side + 4);
    const colour = turnColours();
    for (let device = 0; device < count; device += 1) {
      const n = blockOf[device];
      this.devices.cell(pen, {
        x: (device % columns) * side, y: Math.floor(device / columns) * side, w: side, h: side, device, block: n, text: String(device),
        fill: colour(n), ring: this.over === n ? colourValue("ink") : "", dim: this.over !== null && this.over !== n,
      });
    }
    this.devices.across = columns;
  }

  #mark(block) {
    if (this.over === block) return;
    this.over = block;
    this.#drawBlocks();
    this.#drawDevices();
  }

  #hoverBlock(cell, x, y) {
    this.#mark(cell.block);
    const { layout: { tensor, degrees }, holders } = this.shown;
    const owners = holders.get(cell.block) ?? [];
    const ranges = cell.index.map((i, d) => {
      const size = Math.ceil(tensor.shape[d] / degrees[d]);
      return [tensor.dims[d], `${Math.min(i * size, tensor.shape[d]).toLocaleString("en")} to ${Math.min((i + 1) * size, tensor.shape[d]).toLocaleString("en")}`];
    });
    const lines = [`block ${cell.index.join(", ")}`, ...ranges, `on ${owners.length === 1 ? "device" : `${owners.length} devices:`} ${longList(owners)}`];
    return showTip(lines, x, y);
  }

  #hoverDevice(cell, x, y) {
    this.#mark(cell.block);
    const at = coordinatesOf(cell.device, this.data.axes);
    const same = this.shown.holders.get(cell.block).length;
    const lines = [`device ${cell.device}`, ...this.data.axes.map(([name], i) => [name, String(at[i])]), same > 1 ? `${same} devices hold this block` : "alone holds this block"];
    return showTip(lines, x, y);
  }
}

function steady(devices) {
  if (devices.length < 3) return 0;
  const step = devices[1] - devices[0];
  return devices.every((d, i) => i === 0 || d - devices[i - 1] === step) ? step : 0;
}

function shortList(devices) {
  if (devices.length <= 3) return devices.join(",");
  const step = steady(devices);
  return step ? `${devices[0]}–${devices.at(-1)}${step > 1 ? ` by ${step}` : ""}` : `${devices[0]}.. ×${devices.length}`;
}

function longList(devices) {
  if (steady(devices) || devices.length <= 3) return shortList(devices);
  return devices.length > 24 ? `${devices.slice(0, 24).join(", ")} …` : devices.join(", ");
}

/**
 * Ticks of a pipeline, as `views.draw.PipelineTimeline` places and colors them; hovering a task shows its microbatch on
 * all stages.
 * data.boxes: a list for each field of the tasks: x, y, width, height, fill, label, tip, group (its microbatch, or -1).
 * data.bars: x, y, width, height of the live inputs. data.labels: x, y, text, size. data.width, data.height: pixels.
 */
export class Pipeline {
  constructor(host, data) {
    this.data = data;
    this.over = -1;
    this.slide = element("input", { type: "range", min: -1, max: data.microbatches - 1, step: 1, value: -1, "aria-label": "microbatch", oninput: (event) => this.#mark(Number(event.target.value)) });
    this.state = element("span", { class: "found", role: "status", text: "all" });
    host.append(element("div", { class: "chart-tools" }, element("label", { class: "smooth" }, "microbatch", this.slide), this.state));
    this.cells = new CellCanvas(host, `${data.title}: tasks by stage and tick; arrow keys move between tasks`, {
      onHover: (cell, x, y) => this.#hover(cell, x, y),
      onLeave: () => this.#mark(Number(this.slide.value)),
      draw: () => this.draw(),
    });
  }

  #mark(microbatch) {
    this.state.textContent = microbatch < 0 ? "all" : `${microbatch}`;
    if (microbatch === this.over) return;
    this.over = microbatch;
    this.draw();
  }

  #hover(cell, x, y) {
    this.#mark(cell.group);
    return showTip(cell.tip.split(/: |; /), x, y);
  }

  draw() {
    if (!this.cells.width) return;
    const { boxes, bars, labels, width, height } = this.data;
    const above = Math.min(...labels.y) - 16; // the page has the title
    const pen = this.cells.begin(width, height - above);
    pen.fillStyle = mixed(colourValue("ink"), colourValue("card"), 0.18);
    bars.x.forEach((x, i) => pen.fillRect(x, bars.y[i] - above, bars.width[i], bars.height[i]));
    pen.fillStyle = colourValue("ink");
    labels.x.forEach((x, i) => {
      pen.font = `${labels.size[i]}px system-ui, sans-serif`;
      pen.fillText(labels.text[i], x, labels.y[i] - above);
    });
    boxes.x.forEach((x, i) => {
      const group = boxes.group[i];
      this.cells.cell(pen, {
        x, y: boxes.y[i] - above, w: boxes.width[i], h: boxes.height[i], fill: boxes.fill[i], text: boxes.label[i],
        tip: boxes.tip[i], group, dim: group >= 0 && this.over >= 0 && this.over !== group,
      });
    });
    this.cells.across = 1;
  }
}

/**
 * Health of layers by step: a cell is a number over its median before, blue below and orange above; what is not finite has
 * the colour of errors. data: rows, steps, cells[row][column] (null: not finite), first: {row, column, text} or null.
 */
export class Health {
  constructor(host, data) {
    this.data = data;
    this.cells = new CellCanvas(host, `${data.title}: layers by steps. Arrow keys move between cells`, {
      onHover: (cell, x, y) => this.#tip(cell, x, y),
      onLeave: () => {},
      draw: () => this.draw(),
    });
    this.cells.across = data.steps.length;
  }

  #tip({ row, column }, x, y) {
    const { rows, steps, cells, first } = this.data;
    const factor = cells[row][column];
    const what = factor === null ? "not finite" : `${format(factor)} times the median before`;
    const lines = [`${rows[row]}, step ${steps[column]}`, what];
    if (first && first.row === row && first.column === column) lines.push(first.text);
    showTip(lines, x, y);
    return lines.join(": ");
  }

  draw() {
    const { rows, steps, cells, first } = this.data;
    const left = 110;
    const height = Math.max(4, Math.min(18, 420 / rows.length));
    const width = Math.max(1, (this.cells.width - left) / steps.length);
    const pen = this.cells.begin(left + width * steps.length, height * rows.length + 18);
    const [paper, above, below, bad, ink] = ["surface", "c2", "c1", "bad", "ink"].map(colourValue);
    pen.font = "11px system-ui, sans-serif";
    const every = Math.ceil(13 / height);
    rows.forEach((name, row) => {
      if (row % every === 0) {
        pen.fillStyle = ink;
        pen.textAlign = "left";
        pen.fillText(name.slice(0, 18), 0, (row + 0.5) * height + 4);
      }
      cells[row].forEach((factor, column) => {
        const logs = factor === null ? 0 : Math.log2(Math.max(factor, 1e-9));
        const part = Math.min(1, Math.abs(logs) / 4);
        const fill = factor === null ? bad : mixed(logs > 0 ? above : below, paper, part);
        const marked = first && first.row === row && first.column === column;
        this.cells.cell(pen, { x: left + column * width, y: row * height, w: width, h: height, fill, row, column,
          ring: marked ? bad : undefined });
      });
    });
    pen.fillStyle = ink;
    pen.textAlign = "left";
    pen.fillText(`step ${steps[0]}`, left, height * rows.length + 14);
    pen.textAlign = "right";
    pen.fillText(`${steps[steps.length - 1]}`, left + width * steps.length, height * rows.length + 14);
  }
}
