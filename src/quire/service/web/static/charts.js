// Drawings: hand-written SVG, coloured by the classes of style.css. Each describes in words what it shows.

import { h, s, legend } from "./dom.js";
import { bytes, clock, moment, number, plural, span, snapshotName, dbLink, words } from "./format.js";

export const WAL_STATES = ["open", "sealed", "indexed", "checkpoint_ready", "checkpointed", "truncated"];
export const TIERS = ["local", "local_and_remote", "remote_archived", "evicted"];

// One bar cut into parts: [[name, amount, class, text]].
export function parts(entries) {
  const total = entries.reduce((sum, each) => sum + each[1], 0) || 1;
  const bar = h("div", { class: "bar", "aria-hidden": "true" }, entries.filter((each) => each[1]).map(([name, amount, kind]) =>
    h("i", { class: kind, title: words(name), style: { "flex-grow": String(amount / total) } })));
  return h("div", {}, bar, legend(entries.map(([name, amount, kind, text]) => [`${words(name)} ${text ?? number(amount)}`, kind])));
}

// Segments by state over time: stacked columns, one per sample.
export function statesOverTime(samples, now) {
  if (samples.length < 2) return h("p", { class: "muted" }, "The first samples are being taken.");
  const [width, height, left, bottom] = [520, 190, 30, 20];
  const from = samples[0].at_ms;
  const until = Math.max(now, samples.at(-1).at_ms, from + 1);
  const sums = samples.map((each) => WAL_STATES.reduce((sum, state) => sum + (each.segments[state] || 0), 0));
  const most = Math.max(1, ...sums);
  const x = (at) => left + ((at - from) / (until - from)) * (width - left - 4);
  const y = (count) => height - bottom - (count / most) * (height - bottom - 10);
  const chart = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Segments by state, ${samples.length} samples; now ${WAL_STATES.map((state) => `${samples.at(-1).segments[state] || 0} ${words(state)}`).join(", ")}` });
  for (const line of new Set([0, Math.round(most / 2), most])) {
    chart.append(s("line", { class: "axis", x1: left, x2: width - 4, y1: y(line), y2: y(line) }), s("text", { x: left - 6, y: y(line) + 4, "text-anchor": "end" }, line));
  }
  const floor = samples.map(() => 0);
  for (const state of WAL_STATES) {
    const top = samples.map((each, at) => floor[at] + (each.segments[state] || 0));
    if (top.some((value, at) => value > floor[at])) {
      const steps = (levels) => samples.flatMap((each, at) => {
        const next = samples[at + 1]?.at_ms ?? until;
        return [[x(each.at_ms), y(levels[at])], [x(next), y(levels[at])]];
      });
      const shape = [...steps(top), ...steps(floor).reverse()].map((point) => point.map((value) => value.toFixed(1)).join(",")).join(" ");
      chart.append(s("polygon", { class: `mark s-${state}`, points: shape }, s("title", {}, words(state))));
    }
    top.forEach((value, at) => { floor[at] = value; });
  }
  chart.append(s("text", { x: left, y: height - 4 }, clock(from)), s("text", { x: width - 4, y: height - 4, "text-anchor": "end" }, "now"));
  return chart;
}

// Segments as bars in the order of their lsns: how long each was written, and its state.
export function segmentLanes(segments, now) {
  const held = segments.filter((each) => each.state !== "truncated"); // of the others only the row is left
  const shown = (held.length ? held : segments).slice(-24);
  if (!shown.length) return h("p", { class: "muted" }, "No segments: nothing has been committed yet.");
  const [width, row, left] = [520, 16, 36];
  const height = shown.length * row + 22;
  const from = Math.min(...shown.map((each) => each.created_at_ms || now));
  const until = Math.max(from + 1, ...shown.map((each) => (each.state === "open" ? now : each.sealed_at_ms)));
  const x = (at) => left + ((at - from) / (until - from)) * (width - left - 78);
  const chart = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": plural(shown.length, "segment") });
  shown.forEach((each, at) => {
    const begin = x(each.created_at_ms || from);
    const end = Math.max(begin + 4, x(each.state === "open" ? now : each.sealed_at_ms || each.created_at_ms || from));
    const says = `segment ${each.segment_id}: ${words(each.state)}, lsn ${number(each.first_lsn)}–${number(each.last_lsn)}, ${bytes(each.used_bytes)}${each.blocked ? ", blocked by a reader" : ""}`;
    chart.append(
      s("text", { x: left - 8, y: at * row + 11, "text-anchor": "end" }, each.segment_id),
      s("rect", { class: `mark s-${each.state}${each.blocked ? " blocked" : ""}`, x: begin, y: at * row + 2, width: end - begin, height: row - 4, rx: 3 }, s("title", {}, says)),
      s("text", { x: Math.min(end + 6, width - 72), y: at * row + 11 }, bytes(each.used_bytes)),
    );
  });
  chart.append(s("text", { x: left, y: height - 5 }, clock(from)), s("text", { x: width - 78, y: height - 5, "text-anchor": "end" }, until === now ? "now" : clock(until)));
  return chart;
}

// The chunk map: one square per slot. Arrow keys walk over it; the line below says what a square is.
let mapBy = "generation";
let mapAt = 0;

export function chunkMap(slots, redraw) {
  if (!slots.length) return h("p", { class: "muted" }, "No chunks: nothing has been checkpointed yet.");
  const columns = Math.min(64, Math.max(12, Math.ceil(Math.sqrt(slots.length * 4))));
  const size = 16;
  const rows = Math.ceil(slots.length / columns);
  const generations = [...new Set(slots.map((each) => each.generation))].sort((a, b) => b - a);
  const age = new Map(generations.map((each, at) => [each, Math.min(5, at)]));
  const kind = (each) => (mapBy === "tier" ? `t-${each.tier}` : mapBy === "verified" ? `v-${each.verified}` : `g${age.get(each.generation)}`);
  const say = (each) => `slot ${each.slot}: generation ${each.generation}, ${words(each.tier)}, ${plural(each.links, "link")}, base of ${bytes(each.bytes)}, ${words(each.verified)}, covers lsn ${number(each.covered_lsn)}`;
  mapAt = Math.min(mapAt, slots.length - 1);
  const caption = h("p", { class: "muted small", "aria-live": "polite" }, say(slots[mapAt]));
  const squares = slots.map((each, at) => s("rect", {
    class: `mark ${kind(each)}${at === mapAt ? " here" : ""}`, x: (at % columns) * size + 1, y: Math.floor(at / columns) * size + 1, width: size - 3, height: size - 3, rx: 2.5,
    onmouseenter: () => move(at),
  }));
  function move(to) {
    squares[mapAt].classList.remove("here");
    mapAt = Math.max(0, Math.min(slots.length - 1, to));
    squares[mapAt].classList.add("here");
    caption.textContent = say(slots[mapAt]);
  }
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
  const chart = s("svg", {
    class: "map", viewBox: `0 0 ${columns * size} ${rows * size}`, tabindex: 0, role: "img", "data-key": "map", style: { width: `min(100%, ${columns * size}px)` },
    "aria-label": `Chunk map of ${plural(slots.length, "slot")}; arrow keys move`,
    onkeydown: (event) => { if (steps[event.key]) { event.preventDefault(); move(mapAt + steps[event.key]); } },
  }, squares);
  const button = (by) => h("button", { type: "button", class: "small", "data-key": `by-${by}`, "aria-pressed": String(mapBy === by), onclick: () => { mapBy = by; redraw(); } }, by);
  const meanings = mapBy === "tier" ? TIERS.map((each) => [words(each), `t-${each}`])
    : mapBy === "verified" ? ["verified", "unverified", "missing", "altered"].map((each) => [each, `v-${each}`])
    : generations.slice(0, 6).map((each, at) => [at === 5 ? `${each} and older` : at ? String(each) : `${each} (newest)`, `g${at}`]);
  return h("div", {}, h("div", { class: "row" }, h("span", { class: "muted small" }, "coloured by"), ["generation", "tier", "verified"].map(button)), h("div", { style: { margin: ".8rem 0 .3rem" } }, chart), caption, legend(meanings));
}

// Snapshots on a line of time: what retention keeps, what it lets go, what expires.
export function retentionLine(snapshots, now) {
  const [width, height, pad] = [1080, 84, 40];
  const from = Math.min(...snapshots.map((each) => each.created_at_ms));
  const until = Math.max(now, ...snapshots.map((each) => each.expires_at_ms || 0), from + 1);
  const x = (at) => pad + ((at - from) / (until - from)) * (width - 2 * pad);
  const chart = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${plural(snapshots.length, "snapshot")}, ${snapshots.filter((each) => !each.keep).length} to drop` });
  chart.append(s("line", { class: "axis", x1: pad, x2: width - pad, y1: 48, y2: 48 }));
  let free = -99;
  let last = -99;
  const apart = Math.min(15, (width - 2 * pad) / snapshots.length);
  snapshots.forEach((each, place) => {
    // Dots never cover each other: those of one moment stand side by side.
    const at = Math.min(Math.max(x(each.created_at_ms), last + apart), width - pad - (snapshots.length - 1 - place) * apart);
    last = at;
    if (each.expires_at_ms) chart.append(s("line", { class: `lane k-${each.keep ? "keep" : "drop"}`, x1: at, x2: x(each.expires_at_ms), y1: 48, y2: 48, opacity: .45 }));
    chart.append(s("circle", { class: `mark k-${each.keep ? "keep" : "drop"}`, cx: at, cy: 48, r: 6 }, s("title", {}, `${snapshotName(each)} ${moment(each.created_at_ms)}: ${each.keep ? "kept" : "to be dropped"}, ${each.why}`)));
    if (at - free > 58) {
      chart.append(s("text", { x: at, y: 30, "text-anchor": "middle", class: each.keep ? "strong" : undefined }, snapshotName(each).slice(0, 12)));
      free = at;
    }
  });
  chart.append(
    s("line", { class: "axis", x1: x(now), x2: x(now), y1: 40, y2: 62 }),
    s("text", { x: Math.min(x(now), width - pad), y: 82, "text-anchor": "end" }, "now"), s("text", { x: pad, y: 82 }, `${span(now - from)} ago`),
  );
  return chart;
}

// Delta chains: the base and the deltas over it, as long as their bytes.
export function chains(list) {
  if (!list.length) return h("p", { class: "muted" }, "Every slot is one chunk: there is nothing to merge.");
  return h("div", {}, list.slice(0, 8).map((each) => {
    const total = each.links.reduce((sum, link) => sum + link.bytes, 0) || 1;
    return h("div", { style: { margin: "0 0 .8rem" } },
      h("div", { class: "row small" }, h("b", {}, `slot ${each.slot}`), h("span", { class: "muted" }, `${plural(each.links.length, "link")}, ${bytes(total)}`)),
      h("div", { class: "bar" }, each.links.map((link, at) => h("i", {
        class: link.kind === "base" ? "g0" : `g${Math.min(5, 2 + (at % 3))}`, style: { "flex-grow": String(link.bytes / total) },
        title: `${link.kind} of generation ${link.generation}: ${bytes(link.bytes)}, ${plural(link.pages, "page")}, covers lsn ${number(link.covered_lsn)}`,
      }))));
  }), legend([["base", "g0"], ["deltas", "g3"]]));
}

// The lineage: a lane per database, time from left to right in even steps, a ring per snapshot, a curve per fork.
export function lineage(databases) {
  const moments = databases.flatMap((db) => [[db.created_at_ms, db.db_id, 0], ...db.snapshots.map((one) => [one.created_at_ms, db.db_id, one.snapshot_id])]).sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
  const [left, row] = [190, 52];
  const step = Math.max(26, Math.min(72, 770 / Math.max(1, moments.length)));
  const place = new Map(moments.map(([, db, one], at) => [`${db}:${one}`, left + at * step]));
  const lanes = inOrder(databases);
  const lane = new Map(lanes.map((db, at) => [db.db_id, 34 + at * row]));
  const width = left + moments.length * step + 60;
  const height = lanes.length * row + 26;
  const chart = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": `${plural(lanes.length, "database")}, ${plural(moments.length - lanes.length, "snapshot")}` });
  const kind = (db) => (db.status === "tombstoned" ? "d-gone" : `d-${db.kind}`);
  for (const db of lanes) {
    const y = lane.get(db.db_id);
    const start = place.get(`${db.db_id}:0`);
    if (lane.has(db.parent_db_id)) {
      const at = db.parent_snapshot_id && place.get(`${db.parent_db_id}:${db.parent_snapshot_id}`);
      const x = at || start - step / 2; // of the parent as it was then
      const from = lane.get(db.parent_db_id);
      chart.append(s("path", { class: "edge", d: `M${x} ${from} C${x} ${(from + y) / 2 + 12}, ${x} ${y}, ${start} ${y}` }));
    }
    chart.append(s("line", { class: `lane ${kind(db)}${db.status === "tombstoned" ? " gone" : ""}`, x1: start, x2: width - 40, y1: y, y2: y }));
  }
  for (const db of lanes) {
    const y = lane.get(db.db_id);
    const gone = db.status === "tombstoned";
    const name = db.name || `#${db.db_id}`;
    const label = [s("rect", { class: "hit", x: 2, y: y - 17, width: left - 34, height: 34, rx: 7, fill: "transparent" }), s("text", { class: "strong", x: 10, y: y - 1 }, name.length > 20 ? `${name.slice(0, 19)}…` : name), s("text", { x: 10, y: y + 13 }, gone ? "dropped" : `${db.kind === "lsm" ? "key-value" : db.kind}, ${plural(db.snapshots.length + db.snapshots_left_out, "snapshot")}`)];
    chart.append(gone ? s("g", {}, label) : s("a", { href: dbLink(db.name), "data-key": `lane-${db.db_id}`, "aria-label": `${name}, ${db.kind}` }, label));
    chart.append(s("circle", { class: `mark ${kind(db)}`, cx: place.get(`${db.db_id}:0`), cy: y, r: 4.5 }, s("title", {}, `${name} ${db.parent_db_id ? "forked" : "created"} ${moment(db.created_at_ms)}`)));
    db.snapshots.forEach((one) => {
      const x = place.get(`${db.db_id}:${one.snapshot_id}`);
      const text = snapshotName(one);
      chart.append(s("g", {}, s("circle", { class: `ring ${kind(db)}`, cx: x, cy: y, r: 6.5 }, s("title", {}, `${name}${text}, ${moment(one.created_at_ms)}, lsn ${number(one.anchor_lsn)}`)),
        step >= 40 && s("text", { x, y: y - 13, "text-anchor": "middle" }, text.length > 10 ? `${text.slice(0, 9)}…` : text)));
    });
  }
  return h("div", { class: "scroll", tabindex: 0, "data-key": "lineage-scroll", role: "region", "aria-label": "Lineage, scrolls sideways" }, chart);
}

function inOrder(databases) {
  const known = new Set(databases.map((db) => db.db_id));
  const children = new Map();
  for (const db of databases) {
    const parent = known.has(db.parent_db_id) ? db.parent_db_id : 0;
    children.set(parent, [...(children.get(parent) || []), db]);
  }
  const order = [];
  const stack = [...(children.get(0) || [])].reverse();
  while (stack.length) {
    const db = stack.pop();
    order.push(db);
    stack.push(...[...(children.get(db.db_id) || [])].reverse());
  }
  return order;
}
