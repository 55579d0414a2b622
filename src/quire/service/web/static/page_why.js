// Why something is still there: a box to ask in, who holds it, and what would let it go.

import { h, card, chip, tiles, wide } from "./dom.js";
import { bytes, dbLink, number, plural, words } from "./format.js";
import { get } from "./api.js";

const EXAMPLES = [["a database", "shop"], ["a file of the store", "pages/00000001/wal/00000001.seg"], ["an object's key", "00000001/00000000/base:00000001"]];

export const whyLink = (subject) => `#/why/${encodeURIComponent(subject)}`;

export const why = (subject = "") => {
  let box = null; // kept, so that a live update does not take away what is typed
  return {
    title: "Why",
    async load() {
      const whole = await get("/api/overview");
      const names = whole.databases.map((each) => each.name);
      if (!subject) return { names, answer: null, problem: "" };
      try {
        return { names, answer: await get(`/api/why?subject=${encodeURIComponent(subject)}`), problem: "" };
      } catch (failure) {
        if (![400, 404].includes(failure.status)) throw failure;
        return { names, answer: null, problem: [failure.message, failure.hint].filter(Boolean).join("; ") };
      }
    },
    draw(data) {
      box ||= askingBox(subject);
      box.querySelector("datalist").replaceChildren(...data.names.map((each) => h("option", { value: each })));
      return [
        h("div", { class: "head" }, h("h1", {}, "Why"), h("span", { class: "muted" }, "explains why data is retained and how to free it; on the command line: quire why")),
        box,
        data.problem && h("section", { class: "card" }, h("p", { class: "bad" }, data.problem)),
        data.answer ? explanation(data.answer) : !data.problem && hints(data.names),
      ];
    },
  };
};

function askingBox(subject) {
  const field = h("input", {
    name: "subject", "data-key": "why-subject", value: subject, list: "subjects", autocomplete: "off", spellcheck: "false", "aria-label": "Subject",
    placeholder: "a database, a file of the store, or an object's key",
  });
  const ask = (event) => {
    event.preventDefault();
    const wanted = field.value.trim();
    event.target.reset(); // the form of this address, for "back"
    location.hash = wanted ? whyLink(wanted) : "#/why";
  };
  return h("form", { class: "card ask", role: "search", onsubmit: ask }, field, h("datalist", { id: "subjects" }), h("button", { type: "submit", class: "main", "data-key": "why-ask" }, "Explain"));
}

function hints(names) {
  const examples = EXAMPLES.map(([what, example], at) => [what, at === 0 && names.length ? names[0] : example]);
  return h("div", { class: "grid" }, wide(card("Examples", "", h("dl", { class: "keys" }, examples.map(([what, example]) => [h("dt", {}, what), h("dd", {}, h("a", { href: whyLink(example), "data-key": `why-${what}` }, h("code", {}, example)))])))));
}

function explanation(answer) {
  const shown = names(answer);
  return [
    tiles(["Subject", shown, words(answer.kind)], ["State", words(answer.state) || "–"], ["Size", bytes(answer.size_bytes || 0)], answer.kind === "database" ? ["Holders", number(answer.holders.length)] : ["References", number(answer.references || 0), plural(answer.holders.length, "holder")]),
    h("div", { class: "grid" }, wide(card("Held by", "and how to release it", holders(answer)))),
  ];
}

const names = (answer) => (answer.kind === "database" ? h("a", { href: dbLink(answer.subject), "data-key": "why-db" }, answer.subject) : h("code", { class: "small" }, answer.subject));

export function holders(answer, most = 200) {
  if (!answer.holders.length) return h("p", { class: "muted" }, "Nothing holds it; it can be dropped.");
  return h("ul", { class: "holders" }, answer.holders.slice(0, most).map((each) => h("li", {}, chip(each.kind, `h-${each.kind}`),
    h("div", {}, h("b", {}, each.name), " ", h("span", {}, each.what), h("br"), h("code", { class: "muted" }, each.release)))),
  answer.holders.length > most && h("li", { class: "muted more" }, h("div", {}, `${number(answer.holders.length - most)} more: `, h("code", {}, `quire why ${answer.subject}`))));
}
