// A page: header, contents, sections and their parts; theme, deep links, and updates of a live page.

import { AxisChoice } from "./axis.js";
import { Inspector, mountBars, mountCode, mountFacts, mountFigures, mountFindings, mountText } from "./blocks.js";
import { Chart } from "./chart.js";
import { breakable, element } from "./dom.js";
import { Health, Machine, Pipeline, Placement } from "./drawings.js";
import { Store } from "./store.js";
import { Table } from "./table.js";
import { Timeline } from "./timeline.js";

/** Name of a block in the page's data -> what draws it: a class with `update`, or a function that draws once. */
export const BLOCKS = {
  AxisChoice, Bars: mountBars, Chart, Code: mountCode, Facts: mountFacts, Figures: mountFigures, Findings: mountFindings, Inspector,
  Health, Machine, Pipeline, Placement, Table, Text: mountText, Timeline,
};
const THEMES = ["auto", "light", "dark"];

const store = new Store();
const mounted = new Map();

function isClass(drawer) {
  return typeof drawer === "function" && /^class\s/.test(Function.prototype.toString.call(drawer));
}

/** Draws a block into a new element, which is returned. */
function mountBlock(block) {
  if (block.block === "Grid") {
    return element("div", { class: block.wide ? "grid wide" : "grid", style: { "--columns": block.columns } }, ...block.blocks.map(mountBlock));
  }
  const host = element("div", { class: `block block-${block.block.toLowerCase()}`, id: `block-${block.id}` });
  drawBlock(host, block);
  return host;
}

function drawBlock(host, block) {
  host.replaceChildren();
  if (block.title && block.block !== "Inspector") host.append(element("h3", { text: block.title }));
  if (block.note) host.append(element("p", { class: "note", text: block.note }));
  const drawer = BLOCKS[block.block];
  const instance = isClass(drawer) ? new drawer(host, block, store) : drawer(host, block, store);
  mounted.set(block.id, { host, instance, block });
}

function flat(blocks) {
  return blocks.flatMap((block) => (block.block === "Grid" ? flat(block.blocks) : [block]));
}

function applyTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.dispatchEvent(new Event("themechange"));
}

function remembered(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // a page in a notebook has no storage
  }
}

function themeButton() {
  let theme = THEMES.includes(remembered("meshwright-theme")) ? remembered("meshwright-theme") : "auto";
  const button = element("button", { type: "button", class: "quiet theme" });
  const show = () => {
    button.textContent = `theme: ${theme}`;
    applyTheme(theme);
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try {
      localStorage.setItem("meshwright-theme", theme);
    } catch {
      // the choice lasts as long as the page
    }
    show();
  });
  show();
  return button;
}

function header(page) {
  return element(
    "header",
    { class: "top" },
    element("div", { class: "over" }, element("span", { class: "brand", text: "Meshwright" }), element("span", { text: page.topic }), element("span", { class: "live-state", role: "status" })),
    element("h1", {}, ...breakable(page.title)),
    page.lead ? element("p", { class: "lead", text: page.lead }) : null,
  );
}

function contents(page) {
  const links = page.sections.map((section) =>
    element("a", {
      href: `#${section.id}`, text: section.title,
      onclick: (event) => {
        event.preventDefault();
        goTo(section.id);
      },
    }),
  );
  return element("nav", { class: "contents", "aria-label": "Sections" }, element("div", { class: "links" }, ...links), themeButton());
}

let current = "";

function goTo(id) {
  const target = document.getElementById(id);
  if (!target) return;
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  target.scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "start" });
  current = id;
  writeHash();
}

function writeHash() {
  const state = new URLSearchParams(store.entries());
  const text = `#${current}${state.size ? `?${state}` : ""}`;
  try {
    history.replaceState(null, "", text === "#" ? location.pathname + location.search : text);
  } catch {
    // a page in a notebook has no address of its own
  }
}

function readHash() {
  const [id, state] = location.hash.slice(1).split("?");
  for (const [name, value] of new URLSearchParams(state ?? "")) store.set(name, value);
  return decodeURIComponent(id);
}

function watchSections(page) {
  const links = new Map([...document.querySelectorAll(".contents a")].map((link) => [link.getAttribute("href").slice(1), link]));
  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) if (entry.isIntersecting) {
        for (const [id, link] of links) {
          if (id === entry.target.id) {
            link.setAttribute("aria-current", "true");
            const row = link.parentElement; // of many sections, the current one stays in view
            row.scrollLeft = link.offsetLeft - row.offsetLeft - (row.clientWidth - link.offsetWidth) / 2;
          } else link.removeAttribute("aria-current");
        }
      }
    },
    { rootMargin: "-15% 0px -75% 0px" },
  );
  for (const section of page.sections) observer.observe(document.getElementById(section.id));
}

function drawSection(section) {
  return element(
    "section",
    { id: section.id, "aria-labelledby": `${section.id}-title` },
    element("h2", { id: `${section.id}-title`, text: section.title }),
    section.note ? element("p", { class: "note", text: section.note }) : null,
    ...section.blocks.map(mountBlock),
  );
}

/** Takes a new document of the same page: blocks whose data changed are drawn again, and keep their zoom. */
export function refresh(page) {
  document.title = page.tab;
  document.querySelector("h1").replaceChildren(...breakable(page.title));
  const lead = document.querySelector("header .lead");
  if (lead) lead.textContent = page.lead;
  const known = page.sections.every((section) => document.getElementById(section.id));
  if (!known || flat(page.sections.flatMap((s) => s.blocks)).some((block) => !mounted.has(block.id))) {
    // A new section or block: the sections are made anew.
    mounted.clear();
    document.querySelector("main").replaceChildren(...page.sections.map(drawSection));
    document.querySelector(".contents").replaceWith(contents(page));
    watchSections(page);
    return;
  }
  for (const block of flat(page.sections.flatMap((section) => section.blocks))) {
    const before = mounted.get(block.id);
    if (JSON.stringify(block) === JSON.stringify(before.block)) continue;
    before.block = block;
    if (before.instance?.update) before.instance.update(block);
    else drawBlock(before.host, block);
  }
}

async function follow(live) {
  const state = document.querySelector(".live-state");
  let version = "";
  for (;;) {
    try {
      const answer = await fetch(live.url, { cache: "no-store", headers: version ? { "If-None-Match": version } : {} });
      if (answer.status === 200) {
        version = answer.headers.get("ETag") ?? "";
        const page = await answer.json();
        live = page.live ?? live;
        refresh(page);
      }
      state.textContent = live.state;
      state.dataset.state = live.active ? "on" : "off";
    } catch {
      state.textContent = "the server has stopped";
      state.dataset.state = "off";
    }
    await new Promise((done) => setTimeout(done, live.seconds * 1000));
  }
}

function start() {
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const id = readHash();
  document.getElementById("page").append(
    header(page),
    contents(page),
    element("main", {}, ...page.sections.map(drawSection)),
    element("footer", { text: page.footer }),
  );
  watchSections(page);
  store.onChange = writeHash;
  addEventListener("hashchange", () => document.getElementById(readHash())?.scrollIntoView());
  if (id) {
    current = id;
    document.getElementById(id)?.scrollIntoView();
  }
  globalThis.meshwright = { refresh, store };
  document.documentElement.dataset.ready = "true";
  if (page.live) follow(page.live);
}

start();
