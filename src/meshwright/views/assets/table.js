// Tables that sort by any column, filter by text and by choices, and select rows.

import { breakable, element } from "./dom.js";
import { format } from "./scale.js";

const STEP = 60;
/** Characters of a cell above which it may take several lines. */
const LONG = 22;

function compareCells(a, b) {
  const missing = (v) => v === null || v === undefined || v === "";
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

export class Table {
  constructor(host, data, store) {
    this.host = host;
    this.store = store;
    this.name = data.link || data.id;
    this.narrow = innerWidth <= 560; // there a row is a card: the style sheet stacks its cells
    this.most = Math.min(data.shown ?? STEP, this.narrow ? 12 : STEP);
    this.sort = null;
    this.query = "";
    this.choices = new Map();
    this.#tools(data);
    this.head = element("tr");
    this.body = element("tbody");
    this.table = element(
      "table",
      { class: data.columns.length > 3 ? "stacks" : undefined },
      element("caption", { class: "visually-hidden", text: data.title || "table" }),
      element("thead", {}, this.head),
      this.body,
    );
    this.more = element("button", { type: "button", class: "quiet", onclick: () => this.#show(this.most * 2) });
    host.append(
      element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": data.title || "table" }, this.table),
      this.more,
    );
    if (data.link) store.on(data.link, () => this.#marks());
    store.on(`${this.name}.sort`, () => this.#restore());
    store.on(`${this.name}.filter`, () => this.#restore());
    this.update(data);
    this.#restore();
  }

  /** Takes new data; order and filters stay. */
  update(data) {
    this.data = data;
    this.maxima = data.columns.map((column, i) =>
      column.bar ? data.rows.reduce((most, row) => Math.max(most, Number(row[i]) || 0), 0) || 1 : 0,
    );
    // A column without a single value says nothing.
    this.empty = data.columns.map((_, i) => data.rows.length > 0 && data.rows.every((row) => row[i] === null || row[i] === undefined || row[i] === ""));
    this.head.replaceChildren(
      ...data.columns.map((column, i) => {
        const button = element("button", {
          type: "button", class: "sort", text: column.heading, title: column.note || undefined,
          onclick: () => this.#sortBy(i),
        });
        return element("th", { scope: "col", class: this.#kind(column), hidden: this.empty[i] }, button);
      }),
    );
    this.draw();
  }

  #kind(column) {
    return column.unit === "text" ? (column.wide ? "text wide" : "text") : "number";
  }

  #tools(data) {
    if (!data.searchable) return;
    const id = `filter-${this.name}`;
    this.search = element("input", {
      type: "search", id, placeholder: "filter; -word leaves out",
      oninput: (event) => this.store.set(`${this.name}.filter`, event.target.value),
    });
    const facets = data.columns.map((column, i) => {
      if (!column.choices) return null;
      const values = [...new Set(data.rows.map((row) => row[i]))].filter((v) => v !== "" && v !== null).sort(compareCells);
      if (values.length < 2) return null;
      return element(
        "label",
        { class: "facet" },
        element("span", { text: column.heading }),
        element(
          "select",
          {
            onchange: (event) => {
              this.choices.set(i, event.target.value);
              this.draw();
            },
          },
          element("option", { value: "", text: "all" }),
          ...values.map((value) => element("option", { value, text: value })),
        ),
      );
    });
    this.found = element("span", { class: "found", role: "status" });
    this.host.append(
      element("div", { class: "table-tools" }, element("label", { for: id, class: "visually-hidden", text: `Filter ${data.title}` }), this.search, ...facets, this.found),
    );
  }

  #restore() {
    const [column, direction] = this.store.get(`${this.name}.sort`).split("~");
    this.sort = column ? { column: Number(column), down: direction === "down" } : null;
    this.query = this.store.get(`${this.name}.filter`);
    if (this.search && this.search.value !== this.query) this.search.value = this.query;
    this.draw();
  }

  #sortBy(column) {
    const again = this.sort?.column === column;
    const down = again ? !this.sort.down : false;
    this.store.set(`${this.name}.sort`, again && this.sort.down ? "" : `${column}~${down ? "down" : "up"}`);
  }

  #show(most) {
    this.most = most;
    this.table.parentElement.classList.add("opened"); // of many rows, a part is in view
    this.draw();
  }

  /** Rows that the text and the choices leave, in the chosen order. Words of the text must all occur; `-word` must not. */
  #rows() {
    const words = this.query.toLowerCase().split(/\s+/).filter(Boolean);
    const keep = (row) => {
      for (const [column, value] of this.choices) if (value && String(row[column]) !== value) return false;
      if (!words.length) return true;
      const text = row.map((cell, i) => format(cell, this.data.columns[i]?.unit)).join(" ").toLowerCase();
      return words.every((word) => (word.length > 1 && word[0] === "-" ? !text.includes(word.slice(1)) : text.includes(word)));
    };
    const order = this.data.rows.map((_, i) => i).filter((i) => keep(this.data.rows[i]));
    if (this.sort) {
      const { column, down } = this.sort;
      order.sort((a, b) => (down ? -1 : 1) * compareCells(this.data.rows[a][column], this.data.rows[b][column]) || a - b);
    }
    return order;
  }

  draw() {
    const { data } = this;
    [...this.head.children].forEach((cell, i) => {
      const sorted = this.sort?.column === i;
      cell.setAttribute("aria-sort", sorted ? (this.sort.down ? "descending" : "ascending") : "none");
    });
    const order = this.#rows();
    this.body.replaceChildren(...order.slice(0, this.most).map((i) => this.#row(i)));
    if (this.found) this.found.textContent = order.length === data.rows.length ? `${order.length} rows` : `${order.length} of ${data.rows.length} rows`;
    this.more.hidden = order.length <= this.most;
    this.more.textContent = `Show more (${order.length - this.most} left)`;
    this.#marks();
  }

  #row(i) {
    const { data } = this;
    const key = data.keys?.[i];
    const choosable = data.link && key;
    const cells = data.columns.map((column, c) => {
      const value = data.rows[i][c];
      const text = format(value, column.unit);
      const long = !column.wide && column.unit === "text" && text.length > LONG;
      const cell = element("td", { class: this.#kind(column) + (long ? " long" : ""), hidden: this.empty[c] || ((value === "" || value === null) && this.narrow && c > 0), "data-label": column.heading });
      if (column.bar && typeof value === "number") {
        cell.classList.add("with-bar");
        cell.style.setProperty("--part", `${((value / this.maxima[c]) * 100).toFixed(1)}%`);
      }
      if (c === 0 && choosable) cell.append(element("button", { type: "button", class: "choose", "aria-pressed": "false" }, ...(long ? breakable(text) : [text])));
      else if (value === "" || value === null) cell.textContent = column.unit === "text" ? "" : "–";
      else cell.append(...(long || column.wide ? breakable(text) : [text]));
      return cell;
    });
    const tone = data.tones?.[i];
    return element(
      "tr",
      {
        class: [choosable ? "choosable" : "", tone ?? ""].join(" ").trim() || undefined, "data-key": key,
        onclick: choosable
          ? () => {
              if (!String(getSelection())) this.store.select(data.link, key);
            }
          : undefined,
      },
      ...cells,
    );
  }

  #marks() {
    if (!this.data.link) return;
    const selected = this.store.selected(this.data.link);
    for (const row of this.body.children) {
      const place = selected.indexOf(row.dataset.key);
      row.classList.toggle("selected", place >= 0);
      row.querySelector(".choose")?.setAttribute("aria-pressed", String(place >= 0));
    }
  }
}
