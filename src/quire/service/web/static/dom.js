// Nodes without markup: text is always text, so nothing a store contains can become code.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

export const chip = (text, kind) => h("span", { class: `chip ${kind || ""}` }, text);

export function card(title, note, ...children) {
  return h("section", { class: "card" }, h("header", {}, h("h2", {}, title), note && h("span", { class: "muted small" }, note)), children);
}

export function wide(node) {
  node.classList.add("wide");
  return node;
}

// Columns named `>…` are numbers, `=…` are never broken into lines.
export function table(columns, rows, empty) {
  if (!rows.length) return h("p", { class: "muted" }, empty || "nothing yet");
  const mark = (column) => ({ ">": "num", "=": "whole" })[column[0]];
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, columns.map((each) => h("th", { class: mark(each), scope: "col" }, each.replace(/^[>=]/, ""))))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, at) => h("td", { class: mark(columns[at]) }, cell)))))));
}

export const tiles = (...all) => h("dl", { class: "tiles" }, all.map(([name, value, note, kind]) =>
  h("div", { class: "tile" }, h("dt", {}, name), h("dd", { class: kind }, value, note && h("small", {}, note)))));

export const legend = (entries) => h("div", { class: "legend" }, entries.map(([text, kind]) =>
  h("span", {}, h("i", { class: `swatch ${kind}` }), text)));
