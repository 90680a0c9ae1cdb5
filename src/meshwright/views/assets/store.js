// What is chosen, sorted and filtered on a page: shared by its parts, and kept in the address for deep links.

export class Store {
  #values = new Map();
  #listeners = new Map();
  #limits = new Map();
  onChange = () => {};

  get(name) {
    return this.#values.get(name) ?? "";
  }

  set(name, value) {
    if (this.get(name) === value) return;
    if (value === "") this.#values.delete(name);
    else this.#values.set(name, value);
    for (const listener of this.#listeners.get(name) ?? []) listener(value);
    this.onChange();
  }

  on(name, listener) {
    if (!this.#listeners.has(name)) this.#listeners.set(name, new Set());
    this.#listeners.get(name).add(listener);
  }

  entries() {
    return [...this.#values.entries()];
  }

  /** Most keys of a link that are selected together. */
  limit(link, most) {
    this.#limits.set(link, most);
  }

  selected(link) {
    const text = this.get(link);
    return text ? text.split("~") : [];
  }

  /** Selects a key beside those selected before, the oldest of which makes room; a selected key is unselected. */
  select(link, key) {
    const most = this.#limits.get(link) ?? 1;
    const keys = this.selected(link);
    const without = keys.filter((k) => k !== key);
    if (without.length === keys.length) without.push(key);
    this.set(link, without.slice(-most).join("~"));
  }
}
