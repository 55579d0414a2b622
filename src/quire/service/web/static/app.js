// The frame: which page is shown, live updates, the token, colours, keys.

import { h } from "./dom.js";
import { dbLink, number } from "./format.js";
import { Failure, follow, get, hasToken, post, useToken } from "./api.js";
import { databases, feed, jobs, lineage, overview, verification } from "./pages.js";
import { database } from "./page_database.js";
import { why } from "./page_why.js";

const MENU = [["#/", overview], ["#/lineage", lineage], ["#/feed", feed], ["#/jobs", jobs], ["#/verification", verification], ["#/why", why()], ["#/databases", databases()]];
const DEBOUNCE = 350;
const REDRAW = 10000;
const find = (id) => document.getElementById(id);
const content = find("content");

let page = null;
let data = null;
let shown = "";
let role = "read";
let loading = 0;
let drawn = 0;

// ── pages ──
function pageOf(hash) {
  if (hash.startsWith("#/db/")) return database(decoded(hash.slice(5)));
  if (hash.startsWith("#/databases?")) return databases(hash.slice(12));
  if (hash.startsWith("#/why/")) return why(decoded(hash.slice(6)));
  return (MENU.find(([at]) => at === (hash || "#/")) || MENU[0])[1];
}

// Of an address that somebody typed: a lone % is taken as it stands.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

async function load() {
  const wanted = page;
  const turn = ++loading;
  try {
    const loaded = await wanted.load();
    if (turn !== loading) return; // another page, or a later answer
    data = loaded;
    const text = JSON.stringify({ ...loaded, now_ms: 0 });
    const old = performance.now() - drawn > REDRAW; // "7 s ago" grows old by itself
    if (!isSelecting() && (text !== shown || old)) {
      redraw();
      shown = text;
    }
    content.removeAttribute("data-stale");
  } catch (failure) {
    if (turn !== loading) return;
    if (failure.status === 401 && !find("token").open) askToken();
    if (!data || failure.status === 404) tellFailure(failure);
    else content.setAttribute("data-stale", "");
  }
}

// What somebody is about to copy is not taken from under the mouse.
function isSelecting() {
  const chosen = getSelection();
  return shown !== "" && !chosen.isCollapsed && content.contains(chosen.anchorNode);
}

function redraw() {
  if (!data) return;
  drawn = performance.now();
  const key = content.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const sideways = content.querySelector("[data-key=lineage-scroll]")?.scrollLeft;
  replaceOthers(page.draw(data, ui).flat().filter(Boolean));
  if (sideways !== undefined) content.querySelector("[data-key=lineage-scroll]")?.scrollTo({ left: sideways });
  if (key && !content.contains(document.activeElement)) content.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
  content.dataset.page = page.title;
}

// A form that a page draws again stays where it is, with what is typed in it, the caret and an open list.
function replaceOthers(nodes) {
  for (const child of [...content.childNodes]) if (!nodes.includes(child)) child.remove();
  nodes.forEach((node, at) => {
    if (content.childNodes[at] !== node) content.insertBefore(node, content.childNodes[at] || null);
  });
}

function tellFailure(failure) {
  content.replaceChildren(h("div", { class: "card" }, h("h1", {}, "Request failed"), h("p", { class: "bad" }, failure.message), failure.hint && h("p", { class: "muted" }, failure.hint)));
}

function navigate() {
  page = pageOf(location.hash);
  data = null;
  shown = "";
  document.title = `${page.title} · quire`;
  drawMenu();
  load();
}

// ── menu ──
let summary = null;

async function loadMenu() {
  try {
    summary = await get("/api/overview");
  } catch {
    return; // the page itself says what is wrong
  }
  find("store").textContent = summary.store.path;
  drawMenu();
}

function drawMenu() {
  const at = location.hash || "#/";
  const damaged = summary ? (summary.verified.missing || 0) + (summary.verified.altered || 0) : 0;
  const counts = new Map(summary ? [["#/jobs", [summary.jobs.in_flight + summary.jobs.pending, summary.jobs.failed]], ["#/verification", [0, damaged]]] : []);
  const focused = find("nav").contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  find("nav").replaceChildren(
    ...MENU.map(([to, each]) => {
      const [some, bad] = counts.get(to) || [0, 0];
      return h("a", { href: to, "aria-current": to === at || (to === "#/why" && at.startsWith("#/why/")) || (to === "#/databases" && at.startsWith("#/databases?")) ? "page" : undefined }, h("span", {}, each.title), bad ? h("span", { class: "count bad", title: "failed or damaged" }, number(bad)) : some ? h("span", { class: "count" }, number(some)) : null);
    }),
    ...(summary?.databases.length ? [h("h2", {}, "Databases"), ...summary.databases.slice(0, 24).map((each) => h("a", { class: "sub", href: dbLink(each.name), "aria-current": dbLink(each.name) === at ? "page" : undefined }, h("i", { class: `swatch d-${each.kind}` }), h("span", {}, each.name)))] : []),
  );
  if (focused) find("nav").querySelector(`[href="${CSS.escape(focused)}"]`)?.focus();
}

// ── live updates ──
let due = 0;

function soon() {
  if (due || document.hidden) return;
  due = setTimeout(() => { due = 0; load(); loadMenu(); }, DEBOUNCE);
}

function onEvent(name, payload) {
  state("live");
  if (name === "changes") {
    page?.onChanges?.(payload.changes);
    find("live").classList.remove("pulse");
    void find("live").offsetWidth; // so that the animation starts anew
    find("live").classList.add("pulse");
    find("live").dataset.head = payload.head;
  }
  if (name !== "hello") soon();
}

function state(now) {
  if (find("live").dataset.state === now) return; // a screen reader would announce it with every event
  find("live").dataset.state = now;
  find("live").lastElementChild.textContent = now;
}

let following = null;
let away = false;
let wake = () => {};

// A browser has six connections for one store, over all its tabs: one that is not looked at gives its own back.
function looksChanged() {
  if (document.hidden) following?.abort();
  else {
    wake();
    soon();
  }
}

async function live() {
  let wait = 500;
  for (;;) {
    while (document.hidden || away) {
      state("paused");
      await new Promise((done) => { wake = done; });
      wait = 500;
    }
    following = new AbortController();
    try {
      state("connecting");
      await follow((name, payload) => { wait = 500; onEvent(name, payload); }, following.signal);
    } catch (failure) {
      if (failure instanceof Failure && failure.status === 401) wait = 4000;
    }
    if (!document.hidden && !away) {
      state("offline");
      await new Promise((done) => { wake = done; setTimeout(done, wait); });
      wait = Math.min(8000, wait * 2);
    }
  }
}

// ── doing ──
const ui = {
  redraw,
  snapshot(name) {
    if (role !== "admin") askToken(() => ui.snapshot(name));
    else askSnapshot(name);
  },
  async change(doing, notice) {
    if (role !== "admin") {
      askToken(() => ui.change(doing, notice));
      return;
    }
    try {
      await doing();
      toast(notice);
    } catch (failure) {
      toast(failure.message);
    }
    load();
    loadMenu();
  },
};

function toast(text) {
  const line = h("p", {}, text);
  find("toast").append(line);
  setTimeout(() => line.remove(), 4000);
}

function openDialog(id, onSubmit) {
  const dialog = find(id);
  const form = dialog.querySelector("form");
  const error = dialog.querySelector(".error");
  error.textContent = "";
  form.reset();
  form.onsubmit = async (event) => {
    event.preventDefault();
    try {
      await onSubmit(new FormData(form));
      dialog.close();
    } catch (failure) {
      error.textContent = [failure.message, failure.hint].filter(Boolean).join("; ");
    }
  };
  if (!dialog.open) dialog.showModal();
}

let afterToken = null;

function askToken(then) {
  afterToken = then || null;
  openDialog("token", async (form) => {
    become((await useToken(form.get("token").trim())).role);
    following?.abort();
    navigate();
    loadMenu();
    const next = afterToken;
    afterToken = null;
    if (next) setTimeout(next);
  });
}

function askSnapshot(name) {
  find("snapshot").querySelector("[data-name]").textContent = name;
  openDialog("snapshot", async (form) => {
    const created = await post(`/api/databases/${encodeURIComponent(name)}/snapshots`, { name: form.get("name").trim() });
    toast(`snapshot ${created.snapshot.name || `#${created.snapshot.snapshot_id}`} of ${name} created`);
    load();
    loadMenu();
  });
}

function become(now) {
  role = now;
  find("who").textContent = { admin: "admin", read: "read-only", none: "no access" }[now] || now;
  find("who").title = now === "admin" ? "signed in: this page can change the store" : "sign in to make changes";
}

// ── colours ──
const THEMES = ["auto", "light", "dark"];
const theme = () => document.documentElement.dataset.theme || "auto";

function nextTheme() {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("quire-theme", next);
  } catch {
    // it lasts until the page is left
  }
  sayTheme();
}

function sayTheme() {
  find("theme").textContent = { auto: "◐ auto", light: "○ light", dark: "● dark" }[theme()];
}

// ── keys ──
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]") || event.target.matches("input, select")) return;
  const at = Number(event.key) - 1;
  if (MENU[at]) location.hash = MENU[at][0];
  else if (event.key === "/") askWhy();
  else if (event.key === "c") nextTheme();
  else if (event.key === "t") askToken();
  else if (event.key === "n" && page.name) ui.snapshot(page.name);
  else if (event.key === "?") find("help").showModal();
  else return;
  event.preventDefault();
}

// The box of the page Why, from wherever one is.
function askWhy() {
  location.hash = "#/why";
  const until = performance.now() + 3000;
  const look = () => {
    const field = content.querySelector("[data-key=why-subject]");
    if (field) field.focus();
    else if (performance.now() < until) setTimeout(look, 50);
  };
  setTimeout(look);
}

async function start() {
  sayTheme();
  find("theme").addEventListener("click", nextTheme);
  find("who").addEventListener("click", () => askToken());
  document.addEventListener("keydown", onKey);
  document.addEventListener("visibilitychange", looksChanged);
  // Pages that were left are kept for "back", connection and all, unless they let go of it.
  addEventListener("pagehide", () => { away = true; following?.abort(); });
  addEventListener("pageshow", () => { away = false; looksChanged(); });
  document.addEventListener("click", async (event) => {
    if (event.target.matches(".skip")) {
      event.preventDefault(); // the address says which page is shown
      content.focus();
    }
    const what = event.target.dataset?.act;
    if (what) event.target.closest("dialog").close();
    if (what === "forget") {
      become((await useToken("")).role);
      navigate();
    }
  });
  addEventListener("hashchange", () => { navigate(); content.focus({ preventScroll: true }); scrollTo(0, 0); });
  try {
    become((await get("/api/me")).role);
  } catch (failure) {
    if (hasToken() && failure.status === 401) become((await useToken("")).role); // it was changed meanwhile
  }
  navigate();
  loadMenu();
  live();
}

start();
