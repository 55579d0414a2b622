// The pages but that of a database: each loads its JSON and draws it.

import { h, card, chip, table, tiles, wide } from "./dom.js";
import { ago, bytes, clock, dbLink, moment, number, plural, span, words } from "./format.js";
import { lineage as drawLineage, parts, TIERS, WAL_STATES } from "./charts.js";
import { get, post } from "./api.js";

const OUTCOMES = ["slots", "pages", "bytes", "segments", "deleted", "truncated", "verified", "missing", "altered", "records", "moved", "freed_bytes"];

const link = (name) => h("a", { href: dbLink(name), "data-key": `db-${name}` }, name);

// ── overview ──
export const overview = {
  title: "Overview",
  load: () => get("/api/overview"),
  draw(data, ui) {
    const { store } = data;
    const damaged = (data.verified.missing || 0) + (data.verified.altered || 0);
    const lag = Math.max(0, ...data.cursors.filter((each) => each.state === "live").map((each) => each.lag));
    return [
      h("div", { class: "head" }, h("h1", {}, "Overview"), h("span", { class: "muted" }, `quire ${data.quire}, up ${span(data.now_ms - data.started_ms)}`)),
      tiles(
        ["Databases", number(data.databases.length + data.databases_left_out), data.databases_damaged.length ? `${data.databases_damaged.map((each) => each.name || `#${each.db_id}`).join(", ")}: rows damaged; see quire manifest check` : plural(store.snapshots, "snapshot"), data.databases_damaged.length ? "bad" : undefined],
        ["On disk", bytes(data.space.total_bytes), `${bytes(data.disk_free_bytes)} free on disk`, data.disk_free_bytes < 2 ** 30 ? "warn" : undefined],
        ["In the WAL", bytes(data.wal_bytes), `${plural(data.segments_blocked, "segment")} blocked by readers`],
        ["Readers", number(data.readers), "holding a version open"],
        ["Jobs", number(data.jobs.in_flight + data.jobs.pending), data.jobs.failed ? `${number(data.jobs.failed)} failed` : "none failed", data.jobs.failed ? "warn" : undefined],
        ["Changes", number(store.newest_change), lag ? `${number(lag)} changes behind` : data.cursors.length ? "all followers are up to date" : "no followers"],
        ["Archive", ...archiveTile(store.archive, data.archive_dollars_per_month)],
        ["Owner", `epoch ${number(store.owner_epoch)}`, store.owner_session ? `session ${number(store.owner_session)}, ${store.owner_state}` : store.owner_state === "not needed" ? "objects are local to the store" : store.owner_state, store.owner_state === "fenced" ? "bad" : undefined],
        ["Damaged", number(damaged), `of ${plural(Object.values(data.verified).reduce((sum, each) => sum + each, 0), "artifact")}`, damaged ? "bad" : "good"],
      ),
      h("div", { class: "grid" },
        wide(card("Databases", data.databases_left_out ? h("a", { href: "#/databases" }, `${number(data.databases_left_out)} more`) : "", table(
          ["name", "kind", ">size", ">on disk", ">WAL", ">WAL pages", ">floor", ">readers", ">snapshots", "parent", ">"],
          data.databases.map((each) => databaseRow(each, ui)), "No databases yet. Create one with quire create NAME --kind pages."))),
        card("Tiers", "artifacts by location", tierParts(data.tiers)),
        card("WAL segments", "by state", parts(WAL_STATES.map((state) => [state, data.segments[state] || 0, `s-${state}`]))),
        store.mirrors.length ? wide(card("Mirrors", "lakehouse tables that follow databases", mirrors(store.mirrors, data.now_ms))) : null,
        wide(card("Followers of the feed", "", cursors(data.cursors, data.now_ms)))),
    ];
  },
};

const mirrors = (list, now) => table(["name", "table", "target", ">databases", ">rows", ">behind", ">lag", "up to date", "last error"],
  list.map((each) => [h("b", {}, each.name), each.table, each.target, number(each.held), number(each.rows), number(each.changed + each.dropped),
    h("span", { class: each.every_seconds && each.lag_seconds > 3 * each.every_seconds ? "warn" : undefined }, each.lag_seconds ? span(each.lag_seconds * 1000) : "none"),
    each.synced_at_ms ? ago(each.synced_at_ms, now) : h("span", { class: "muted" }, "never"),
    each.failures ? h("span", { class: "bad small" }, `${plural(each.failures, "run")} failed: ${each.error}`) : ""]));

// What losing the disk now would mean: the words of `quire archive status`.
function archiveTile(archive, dollars) {
  if (!archive) return ["off", "losing this disk loses everything since the last backup: quire archive on", "warn"];
  const drill = archive.last_drill ? (archive.last_drill.problems.length ? "last drill failed" : "last drill passed") : "no drill yet";
  const bad = ["behind", "fenced", "stopped"].includes(archive.state) || (archive.last_drill && archive.last_drill.problems.length);
  const waiting = archive.memory_bytes + archive.backlog_bytes;
  const lag = archive.lag_seconds >= 1 ? `${archive.lag_seconds.toFixed(1)} s behind, ${bytes(waiting)} waiting` : `${archive.mode}, ${span(archive.retain_seconds * 1000)} restorable, ${drill}, about US$ ${dollars.toFixed(2)} a month`;
  return [archive.state, lag, bad ? "bad" : archive.state === "archived" ? "good" : undefined];
}

function databaseRow(each, ui) {
  const isPages = each.kind === "pages";
  const quiet = (text) => h("span", { class: "muted" }, text);
  return [
    h("b", {}, link(each.name)), chip(each.kind === "lsm" ? "key-value" : each.kind, `d-${each.kind}`), bytes(each.size_bytes), bytes(each.disk_bytes),
    isPages ? bytes(each.wal_bytes) : quiet("–"), isPages ? number(each.wal_pages) : quiet("–"), isPages ? number(each.floor_lsn) : quiet("–"),
    each.readers ? h("span", { class: each.segments_blocked ? "warn" : undefined }, number(each.readers)) : quiet("0"), number(each.snapshots),
    each.follows ? quiet(`follows ${each.follows}`) : each.parent ? link(each.parent) : "", h("button", { type: "button", class: "small", "data-key": `snap-${each.name}`, "aria-label": `New snapshot of ${each.name}`, onclick: () => ui.snapshot(each.name) }, "Snapshot"),
  ];
}

// ── databases ──
const KINDS = [["", "all kinds"], ["pages", "pages"], ["stream", "stream"], ["lsm", "key-value"]];
const SORTS = [["name", "by name"], ["written", "last change first"], ["size", "largest first"]];
const FIELDS = ["prefix", "kind", "tag", "sort", "after"];

const databasesLink = (asked) => {
  const query = new URLSearchParams(FIELDS.filter((field) => asked[field]).map((field) => [field, asked[field]]));
  return `#/databases${query.size ? `?${query}` : ""}`;
};

export const databases = (query = "") => {
  const asked = Object.fromEntries(new URLSearchParams(query));
  let box = null; // kept, so that a live update does not take away what is typed
  return {
    title: "Databases",
    async load() {
      try {
        return { ...(await get(`/api/databases?${new URLSearchParams(asked)}`)), problem: "" };
      } catch (failure) {
        if (failure.status !== 400) throw failure;
        return { databases: [], after: "", problem: [failure.message, failure.hint].filter(Boolean).join("; ") };
      }
    },
    draw(data, ui) {
      return [
        h("div", { class: "head" }, h("h1", {}, "Databases"), h("span", { class: "muted" }, "on the command line: quire ls")),
        (box ||= filterBox(asked)),
        data.problem && h("section", { class: "card" }, h("p", { class: "bad" }, data.problem)),
        !data.problem && h("section", { class: "card" }, table(
          ["name", "kind", ">size", ">on disk", ">WAL", ">WAL pages", ">floor", ">readers", ">snapshots", "parent", ">"],
          data.databases.map((each) => databaseRow(each, ui)), "No database matches.")),
        h("p", {},
          asked.after && h("a", { href: databasesLink({ ...asked, after: "" }), "data-key": "first-page" }, "First page"), " ",
          data.after && (asked.sort || "name") === "name" && h("a", { href: databasesLink({ ...asked, after: data.after }), "data-key": "next-page" }, "Next page"),
          data.after && (asked.sort || "name") !== "name" && h("span", { class: "muted" }, "There are more: the list by name has pages.")),
      ];
    },
  };
};

function filterBox(asked) {
  const field = (name, placeholder) => h("input", { name, placeholder, value: asked[name], "data-key": `filter-${name}`, "aria-label": placeholder, autocomplete: "off", spellcheck: "false" });
  const choice = (name, label, all) => h("select", { name, "data-key": `filter-${name}`, "aria-label": label, onchange: (event) => event.target.form.requestSubmit() },
    all.map(([key, text]) => h("option", { value: key, selected: key === (asked[name] || all[0][0]) }, text)));
  const ask = (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(event.target));
    event.target.reset(); // the form of this address, for "back"
    location.hash = databasesLink({ ...given, prefix: given.prefix.trim(), tag: given.tag.trim(), sort: given.sort === "name" ? "" : given.sort });
  };
  return h("form", { class: "card ask", role: "search", onsubmit: ask }, field("prefix", "prefix, or tenant-*"), field("tag", "tag, or tag=value"),
    choice("kind", "Kind", KINDS), choice("sort", "Order", SORTS), h("button", { type: "submit", class: "main", "data-key": "filter" }, "Show"));
}

export const tierParts = (tiers) => parts(TIERS.map((tier) => [tier, tiers[tier]?.bytes || 0, `t-${tier}`, `${bytes(tiers[tier]?.bytes || 0)} in ${number(tiers[tier]?.artifacts || 0)}`]));

const cursors = (list, now) => table(["name", "state", ">acknowledged", ">behind", "last seen"],
  list.map((each) => [each.name || `#${each.cursor_id}`, each.state === "live" ? chip("live", "v-verified") : [chip("lost", "v-missing"), " ", h("span", { class: "small muted" }, each.lost_reason)], number(each.acked_sequence), number(each.lag), ago(each.updated_at_ms, now)]),
  "No followers. Start one with store.feed.follow(\"my-app\").");

// ── lineage ──
export const lineage = {
  title: "Lineage",
  load: () => get("/api/lineage"),
  draw(data) {
    return [
      h("div", { class: "head" }, h("h1", {}, "Lineage"), h("span", { class: "muted" }, "database lineage: one lane per database, one ring per snapshot, one curve per fork")),
      data.left_out ? h("p", { class: "muted" }, `${number(data.left_out)} more: quire tree --limit 0 shows all`) : null,
      h("section", { class: "card" }, data.databases.length ? drawLineage(data.databases) : h("p", { class: "muted" }, "No databases yet.")),
    ];
  },
};

// ── the feed ──
let fresh = new Set();
const unfolded = new Set();

export const feed = {
  title: "Change feed",
  load: () => get("/api/feed?limit=100"),
  onChanges(changes) {
    fresh = new Set(changes.map((each) => each.sequence));
  },
  draw(data) {
    const drawn = data.changes.map(changeLine);
    fresh = new Set();
    return [
      h("div", { class: "head" }, h("h1", {}, "Change feed"), h("span", { class: "muted" }, `every commit, newest first; ${number(data.oldest_sequence)} to ${number(data.head_sequence)} are retained`)),
      h("div", { class: "grid" },
        wide(card("Changes", "", drawn.length ? h("div", { id: "changes" }, drawn) : h("p", { class: "muted" }, "No commits yet."))),
        wide(card("Followers", "", cursors(data.cursors, data.now_ms)))),
    ];
  },
};

function changeLine(each) {
  const kinds = Object.entries(each.kinds).map(([name, count]) => (count > 1 ? `${name} × ${number(count)}` : name)).join(", ");
  const whole = () => h("pre", {}, each.details.map((op) => `${JSON.stringify(op)}\n`), each.operations > each.details.length ? `… ${number(each.operations - each.details.length)} more operations` : "");
  const line = h("details", { class: `change${fresh.has(each.sequence) ? " new" : ""}`, open: unfolded.has(each.sequence) },
    h("summary", { "data-key": `change-${each.sequence}` }, h("b", {}, number(each.sequence)), h("span", { class: "muted" }, clock(each.committed_at_ms)), h("span", {}, each.databases.join(", ") || h("span", { class: "muted" }, "the store")), h("span", {}, kinds)));
  const toggle = () => {
    if (line.open) {
      unfolded.add(each.sequence);
      if (line.children.length === 1) line.append(whole());
    } else unfolded.delete(each.sequence);
  };
  line.addEventListener("toggle", toggle);
  if (line.open) toggle();
  return line;
}

// ── jobs ──
export const jobs = {
  title: "Jobs",
  load: () => get("/api/jobs"),
  draw(data, ui) {
    const count = (state) => data.jobs.filter((each) => each.state === state).length;
    return [
      h("div", { class: "head" }, h("h1", {}, "Jobs"), h("span", { class: "muted" }, "durable background work: checkpoints, merges, moves between tiers, deletions")),
      tiles(["Running", number(count("in_flight"))], ["Waiting", number(count("pending"))], ["Failed", number(count("failed_permanent")), "", count("failed_permanent") ? "warn" : undefined], ["Done", number(count("succeeded")), data.left_out ? `and ${number(data.left_out)} older` : "of those kept"]),
      h("section", { class: "card" }, jobTable(data.jobs, data.now_ms, ui)),
    ];
  },
};

export function jobTable(list, now, ui) {
  const order = { in_flight: 0, pending: 1 };
  const sorted = [...list].sort((a, b) => (order[a.state] ?? 2) - (order[b.state] ?? 2) || b.job_id - a.job_id); // what is to be done first
  return table([">job", "=kind", "database", "=state", "=progress", "=when", "details", "="], sorted.map((each) => [
    number(each.job_id), words(each.kind), each.database ? link(each.database) : h("span", { class: "muted" }, "–"), chip(each.state === "failed_permanent" ? "failed" : words(each.state), `j-${each.state}`), progress(each),
    h("span", { title: moment(each.finished_at_ms || each.started_at_ms || each.created_at_ms) }, when(each, now)), h("span", { class: each.state === "failed_permanent" ? "bad small" : "muted small" }, each.error || each.worker || outcome(each)),
    [each.may_retry && act("Retry", "retry", each, ui), each.may_cancel && act("Cancel", "cancel", each, ui)],
  ]), "No jobs yet.");
}

// What came of it, in figures, and how long it took.
function outcome(each) {
  const phrases = Object.entries(each.result || {}).filter(([name]) => OUTCOMES.includes(name)).map(([name, value]) => (name.endsWith("bytes") ? bytes(value) : plural(value, words(name).replace(/s$/, ""))));
  if (each.state !== "succeeded" || !each.started_at_ms) return phrases.join(", ");
  const took = each.finished_at_ms - each.started_at_ms;
  return [...(phrases.length ? phrases : ["nothing to do"]), `in ${took < 9500 ? `${(took / 1000).toFixed(1)} s` : span(took)}`].join(", ");
}

function progress(each) {
  if (!each.total) return each.attempt > 1 ? h("span", { class: "muted small" }, `attempt ${each.attempt}`) : "";
  const share = Math.min(100, Math.round((100 * each.done) / each.total));
  return h("div", {}, h("span", { class: "small" }, `${number(each.done)} of ${number(each.total)}`),
    h("div", { class: "progress", role: "progressbar", "aria-valuenow": share, "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": `job ${each.job_id}` }, h("i", { style: { width: `${share}%` } })));
}

function when(each, now) {
  if (each.state === "in_flight") return `for ${span(now - each.started_at_ms)}`;
  if (each.state === "pending") return each.not_before_ms > now ? `due in ${span(each.not_before_ms - now)}` : `waiting for ${span(now - each.created_at_ms)}`;
  return ago(each.finished_at_ms, now);
}

const act = (text, verb, each, ui) => h("button", {
  type: "button", class: "small", "data-key": `${verb}-${each.job_id}`, "aria-label": `${text} job ${each.job_id}`,
  onclick: () => ui.change(() => post(`/api/jobs/${each.job_id}/${verb}`), verb === "retry" ? `job ${each.job_id} re-queued` : `job ${each.job_id} cancelled`),
}, text);

// ── verification ──
export const verification = {
  title: "Verification",
  load: () => get("/api/verification"),
  draw(data, ui) {
    const states = ["verified", "unverified", "missing", "altered"];
    return [
      h("div", { class: "head" }, h("h1", {}, "Verification"), h("span", { class: "muted" }, "whether every artifact in the catalog exists and is intact; run quire verify to check")),
      h("div", { class: "grid" },
        wide(card("Artifacts", "", parts(states.map((state) => [state, data.totals[state] || 0, `v-${state}`])))),
        wide(card("Databases", data.databases_left_out ? h("a", { href: "#/databases" }, `${number(data.databases_left_out)} more`) : "", table(["name", ">artifacts", ">verified", ">never verified", ">damaged", "oldest verification"], data.databases.map((each) => {
          const damaged = (each.verified.missing || 0) + (each.verified.altered || 0);
          return [link(each.name), number(each.artifacts), number(each.verified.verified || 0), number(each.verified.unverified || 0), h("span", { class: damaged ? "bad" : "muted" }, number(damaged)), each.oldest_verified_ms ? ago(each.oldest_verified_ms, data.now_ms) : h("span", { class: "muted" }, "never")];
        }), "No databases yet."))),
        data.damaged.length ? wide(card("Damaged", data.damaged_left_out ? `${number(data.damaged_left_out)} more` : "", table(["object", "database", "state", ">size", "seen"], data.damaged.map((each) => [h("code", {}, each.object), each.database, chip(each.state, `v-${each.state}`), bytes(each.size_bytes), ago(each.verified_at_ms, data.now_ms)])))) : null,
        wide(card("Verifications", "newest first", jobTable(data.jobs, data.now_ms, ui)))),
    ];
  },
};
