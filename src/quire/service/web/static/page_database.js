// One database: its WAL, readers, chunks, snapshots, jobs, and what keeps it.

import { h, card, chip, legend, table, tiles, wide } from "./dom.js";
import { ago, bytes, dbLink, moment, number, plural, snapshotName, span, words } from "./format.js";
import { chains, chunkMap, parts, retentionLine, segmentLanes, statesOverTime, WAL_STATES } from "./charts.js";
import { jobTable, tierParts } from "./pages.js";
import { holders, whyLink } from "./page_why.js";
import { get } from "./api.js";

export const database = (name) => ({
  title: name,
  name,
  load: () => get(`/api/databases/${encodeURIComponent(name)}`),
  draw(data, ui) {
    const db = data.database;
    return [
      h("div", { class: "head" },
        h("h1", {}, db.name), chip(db.kind === "lsm" ? "key-value" : db.kind, `d-${db.kind}`), db.status !== "active" && chip(words(db.status), "j-pending"),
        db.parent && h("span", { class: "muted" }, "forked from ", h("a", { href: dbLink(db.parent), "data-key": "parent" }, db.parent)),
        h("span", { class: "muted" }, `created ${moment(db.created_at_ms)}`), h("span", { class: "spring" }),
        h("button", { type: "button", class: "main", "data-key": "snapshot", onclick: () => ui.snapshot(db.name) }, "New snapshot")),
      figures(data),
      h("div", { class: "grid" },
        data.pages && pages(data, ui), data.stream && stream(data), data.files && keyValue(data),
        wide(card("Retention", policy(data.retention), data.snapshots.length ? [retentionLine(data.snapshots, data.now_ms), snapshots(data)] : h("p", { class: "muted" }, "No snapshots yet."))),
        card("Retained by", "and how to free it", holders(data.why, 12), h("p", { class: "small" }, h("a", { href: whyLink(db.name), "data-key": "why" }, "explain something else"))),
        card("History", "newest first", audit(data)),
        wide(card("Jobs", "", jobTable(data.jobs, data.now_ms, ui)))),
    ];
  },
});

function figures(data) {
  const { database: db, pages: engine, snapshots } = data;
  const first = [["Size", atLeast(data, bytes(db.size_bytes)), `${bytes(db.disk_bytes)} on disk${db.page_size ? `, pages of ${bytes(db.page_size)}` : ""}`], ["Snapshots", number(db.snapshots), `${number(snapshots.filter((each) => !each.keep).length)} to expire`]];
  if (data.stream) return tiles(...first, ...streamFigures(data));
  if (!engine) return tiles(...first, ...kvFigures(data));
  const wal = engine.wal || {};
  const blocked = engine.segments.filter((each) => each.blocked).length;
  return tiles(...first,
    ["Newest lsn", number(engine.newest_lsn), `${number(engine.size_pages)} pages`],
    ["In the WAL", number(engine.wal_pages), wal.last_success_at_ms ? `pages since the checkpoint ${ago(wal.last_success_at_ms, data.now_ms)}` : "pages; no checkpoint yet"],
    ["Floor", number(engine.floor_lsn), "oldest lsn that readers may still request"],
    ["Readers", number(engine.readers.length), blocked ? `${plural(blocked, "segment")} blocked` : "none blocked", blocked ? "warn" : undefined],
    ["Chunks", number(engine.slots.length), chained(engine.chain_lengths)],
    ...(data.followed ? [["Follows", data.followed.path.split("/").pop(), data.followed.trouble || data.followed.path, data.followed.trouble ? "warn" : undefined]] : []));
}

function streamFigures({ figures: open }) {
  if (!open) return [["Records", "–", "not open"]];
  const lag = Math.max(0, ...Object.values(open.consumers).map((each) => each.behind));
  return [
    ["Records", number(open.records), open.records ? `${number(open.first_record)} to ${number(open.last_record)}` : "none"],
    ["Hot", bytes(open.hot_bytes), plural(open.hot_segments, "segment")], ["Warm", bytes(open.warm_bytes), plural(open.warm_segments, "segment")],
    ["Remote", bytes(open.remote_bytes), plural(open.remote_segments, "segment")],
    ["Consumers", number(Object.keys(open.consumers).length), lag ? `${number(lag)} records behind` : "all are up to date"]];
}

function kvFigures({ figures: open }) {
  if (!open) return [["Tables", "–", "not open"]];
  return [
    ["Newest lsn", number(open.last_lsn)], ["Tables", number(open.tables), bytes(open.table_bytes)], ["Rows", number(open.rows), `${number(open.tombstones)} of them deletions`],
    ["In memory", bytes(open.memtable_bytes), `${plural(open.memtable_keys, "key")}${open.frozen ? `, ${number(open.frozen)} more to flush` : ""}`],
    ["Upkeep", number(open.flushes + open.compactions), `${plural(open.flushes, "flush").replace("flushs", "flushes")}, ${plural(open.compactions, "compaction")}`]];
}

function chained(lengths) {
  const more = Object.entries(lengths).reduce((sum, [length, count]) => sum + (length > 1 ? count : 0), 0);
  return more ? `${number(more)} with deltas` : "none with deltas";
}

function pages(data, ui) {
  const { pages: engine, now_ms: now } = data;
  return [
    card("Segments by state", "over time", statesOverTime(engine.states, now), legend(WAL_STATES.map((state) => [words(state), `s-${state}`]))),
    card("Segments", engine.segments_left_out ? `the newest; ${number(engine.segments_left_out)} more` : "from first commit to seal", segmentLanes(engine.segments, now)),
    wide(card("Readers", "readers that hold back the floor, lowest version first", table([">reader", ">at lsn", "=since", "who"], engine.readers.map((each) => [
      each.reader_id ? number(each.reader_id) : "–", number(each.lsn), ago(each.opened_at_ms, now), [each.pid ? `pid ${each.pid}${each.host ? ` on ${each.host}` : ""}` : "", ...Object.entries(each.tags).map(([key, value]) => `${key}=${value}`), each.set_aside ? "set aside" : ""].filter(Boolean).join(", ") || h("span", { class: "muted" }, "this process")]),
      "No readers. Checkpoints may cover everything that is published."))),
    card("Chunk map", plural(engine.slots.length, "slot") + (engine.slots_left_out ? ", the first" : ""), chunkMap(engine.slots, ui.redraw)),
    card("Delta chains", "the longest", chains(engine.chains)),
    wide(card("Tiers", "artifacts by location", tierParts(data.tiers))),
  ];
}

function stream(data) {
  const { stream: log } = data;
  const tier = (name, kind) => [name, log.tiers[name] || 0, kind];
  const lost = log.needs_repair || [];
  return [
    lost.length > 0 && wide(card("Needs repair", plural(lost.length, "segment"), h("p", { class: "bad" }, `The only copy of segment ${lost.join(", ")} was an object that no longer exists: quire stream repair ${data.database.name}`))),
    card("Tiers", "segments with a whole copy", parts([tier("hot", "t-hot"), tier("warm", "t-warm"), tier("remote", "t-remote")])),
    card("On this disk", log.files_at_least ? "at least; not all files were counted" : "", table(["part", ">files", ">bytes"], Object.entries(log.files).map(([name, each]) => [name, number(each.files), bytes(each.bytes)]))),
    consumers(data),
    wide(card("Manifest log", `${plural(log.chunks.length, "chunk")}, ${plural(log.snapshots.length, "snapshot")} on disk; newest records first`,
      log.problem && h("p", { class: "bad" }, log.problem),
      table(["at", "when", "record", ">segment", "says", "tier 2"], log.records.map((each) => [`${each.chunk_index}:${each.chunk_offset}`, moment(each.timestamp_ms), each.record, each.segment_id || "–", h("code", {}, Object.entries(each.fields).map(([key, value]) => `${key}=${value}`).join(" ")), each.tier2]), "The log is empty: nothing has been appended yet."))),
  ];
}

const LEVELS = ["g0", "g1", "g2", "g3", "g4", "g5"];

const keyValue = (data) => [
  data.figures && wide(card("Levels", "tables in each, from the newest to the oldest", parts(data.figures.levels.map((count, at) => [`level ${at}`, count, LEVELS[Math.min(at, 5)]])))),
  wide(files(data)),
];

const consumers = ({ figures: open }) => open && wide(card("Consumers", "how far each has read", table(["name", ">next record", ">behind"],
  Object.entries(open.consumers).map(([name, each]) => [name, number(each.position), number(each.behind)]), "No consumers registered.")));

// With very many files, only some are counted.
const atLeast = (data, text) => (data.files_at_least ? `at least ${text}` : text);

const files = (data) => card("Files", atLeast(data, plural(data.files.length + data.files_left_out, "file")) + (data.files_left_out ? `, the first ${number(data.files.length)}` : ""), table(["path", ">bytes"], data.files.map((each) => [h("code", {}, each.path), bytes(each.bytes)]), "No files yet."));

function policy(rules) {
  if (!rules) return "no policy; everything is kept";
  const phrases = ["keep_last", "keep_generations", "hourly", "daily", "weekly"].filter((each) => rules[each]).map((each) => `${words(each)} ${rules[each]}`);
  if (rules.keep_seconds) phrases.push(`younger than ${span(rules.keep_seconds * 1000)}`);
  if (rules.schedules.length) phrases.push(`creates ${rules.schedules.join(", ")}`);
  return phrases.join(", ") || "no rules; everything is kept";
}

const snapshots = (data) => [newest(data), data.snapshots.length > 12 && h("p", { class: "muted small" }, `${number(data.snapshots.length - 12)} older: quire snapshot ls ${data.database.name}`)];

const newest = (data) => table(["snapshot", "created", ">lsn", ">pages", "retention", ""], [...data.snapshots].reverse().slice(0, 12).map((each) => [
  h("b", {}, snapshotName(each)), h("span", { title: moment(each.created_at_ms) }, ago(each.created_at_ms, data.now_ms)), number(each.anchor_lsn), number(each.size_pages), chip(each.keep ? "kept" : "expires", each.keep ? "k-keep" : "k-drop"), h("span", { class: "muted small" }, each.why)]),
  "");

const audit = (data) => table(["=when", "=what", "subject"], data.audit.slice(0, 15).map((each) => [
  h("span", { title: moment(each.at_ms) }, ago(each.at_ms, data.now_ms)), words(each.action), h("span", {}, h("code", {}, each.subject || (each.number ? `#${each.number}` : "")), each.size_bytes ? h("span", { class: "muted" }, ` ${bytes(each.size_bytes)}`) : "")]),
  "No entries yet.");
