"use strict";
// What the server sends is in page/columns.py (state, diff) and page/incidents.py. All text is set as text.
const $ = (id) => document.getElementById(id);
const PHASES = [["C", "computing"], ["R", "ready to update"], ["U", "updating"], ["N", "updated"], ["S", "step skipped"],
  ["T", "torn update"], ["D", "done"], ["X", "dead"], ["?", "connection lost"], ["-", "not registered"]];
const COLOUR = {"?": "L", "-": "none"};
const STAGES = ["settling", "proceeding", "saving", "verifying", "publishing"];
const KINDS = {dead: ["dead", "bad"], lost: ["connection lost", "bad"], silent: ["silent", "warn"], slow: ["slow", "warn"],
  stands: ["stands", "warn"], waits: ["waits for others", ""], unregistered: ["not registered", ""]};
const OUTCOMES = {SAVED: ["saved", "good"], NOT_SAVED: ["NOT SAVED", "bad"], NOTHING_TO_SAVE: ["nothing to save", "warn"],
  FALSE_ALARM: ["false alarm", "good"], RECOVERED: ["recovered", "good"]};
const BARS = {trains: "trains", parked: "parked: its weights do not change", saves: "writes the checkpoint", dead: "dead", starts: "starts again, resumes"};
const CELL_MIN = 12, CELL_MAX = 26, LABEL = 54, GAP = 12, LETTER = 7.5, QUIET_MS = 20000, INCIDENTS_MAX = 30;
let state = null, skew = 0, items = new Map(), after = 0, asking = false, cells = [], picked = -1, drawn = "", root = "";

// ---------------------------------------------------------------- words
const put = (id, text) => { const e = $(id); if (e.textContent !== String(text)) e.textContent = text; };
const show = (id, on) => { $(id).hidden = !on; };
const make = (tag, text, kind) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text; if (kind) e.className = kind; return e; };
const now = () => Date.now() / 1000 - skew;
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
function size(bytes) {
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (bytes < 1000 || unit === "TB") return `${bytes < 10 && unit !== "B" ? bytes.toFixed(1) : Math.round(bytes)} ${unit}`;
    bytes /= 1000;
  }
}
function span(seconds) {
  const s = Math.max(0, seconds);
  if (s < 0.1) return `${(s * 1000).toFixed(s < 0.01 ? 1 : 0)} ms`;
  if (s < 60) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  return s < 5400 ? `${Math.round(s / 60)} min` : s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
}

// ---------------------------------------------------------------- what the server says
const headers = () => { const token = sessionStorage.getItem("token"); return token ? {authorization: `Bearer ${token}`} : {}; };
async function get(path, more) {
  const answer = await fetch(path, {headers: headers(), cache: "no-store", ...more});
  if (answer.status === 401) askForToken();
  if (!answer.ok) throw new Error(`${answer.status} ${(await answer.text()).trim()}`);
  return answer;
}
function askForToken() {
  show("wrong", sessionStorage.getItem("token") !== null);
  show("ask", true); show("main", false); $("token").focus();
  asking = true;
}
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", $("token").value);
  show("ask", false); show("main", true);
  asking = false; listen();
});
async function listen() {
  const stop = new AbortController();
  let watchdog = 0;
  const alive = () => { clearTimeout(watchdog); watchdog = setTimeout(() => stop.abort(), QUIET_MS); };
  try {
    alive();
    const answer = await get("events", {signal: stop.signal});
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let left = "";
    for (;;) {
      const {done, value} = await reader.read();
      if (done) break;
      alive();
      const parts = (left + value).split("\n\n");
      left = parts.pop();
      parts.forEach(take);
    }
    throw new Error("the page's server has closed the connection");
  } catch (error) {
    $("link").className = "link lost";
    put("link", asking ? "a token is needed" : stop.signal.aborted ? "no answer from lastwords serve; trying again" : `${error.message}; trying again`);
  }
  clearTimeout(watchdog);
  if (!asking) setTimeout(listen, 2000);
}
function take(part) {
  const event = /^event: (.*)$/m.exec(part), text = /^data: (.*)$/m.exec(part);
  if (!event || !text) return;
  const told = JSON.parse(text[1]);
  if (event[1] === "state") { state = told; skew = Date.now() / 1000 - told.now; }
  else for (const [key, value] of Object.entries(told)) {
    const isRuns = (key === "phase" || key === "flag") && typeof value !== "string";
    state[key] = isRuns ? value.reduce((column, [at, run]) => column.slice(0, at) + run + column.slice(at + run.length), state[key]) : value;
  }
  render();
}

// ---------------------------------------------------------------- the page
function render() {
  const s = state;
  const known = s.world > 0;
  document.title = known ? `${s.live ? "" : "○ "}${s.open ? "INCIDENT · " : ""}step ${s.step} · ${s.job}` : "lastwords";
  put("job", known ? s.job : "lastwords");
  $("link").className = s.live ? "link" : "link lost";
  put("link", s.live ? `controller at ${s.controller}, generation ${s.generation}` : known ? "the controller does not answer" : "waiting for a job");
  const notes = [s.live ? "" : s.note, s.live || !s.heard ? "" : `What is below was true ${span(Math.max(1, now() - s.heard))} ago.`, s.files_note];
  put("note", notes.filter((note) => note).map((note) => note[0].toUpperCase() + note.slice(1)).join(" · "));
  show("note", notes.some((note) => note));
  for (const id of ["facts", "grid", "legend", "fine", "odd"]) $(id).classList.toggle("stale", known && !s.live);
  put("step", known ? s.step.toLocaleString("en") : "–");
  put("rate", s.rate === null || s.open ? "–" : s.rate < 0.1 ? Number(s.rate.toPrecision(2)) : s.rate < 10 ? s.rate.toFixed(2) : Math.round(s.rate));
  put("stage", !known ? "–" : s.live ? s.stage : "gone");
  put("connected", known ? (s.connected === s.world ? "" : `${s.connected.toLocaleString("en")} of `) + s.world.toLocaleString("en") : "–");
  const newest = s.checkpoints.find((one) => one.complete);
  put("newest", newest ? `${span(now() - newest.unix_s)} old` : "none");
  renderOpen(s, newest);
  draw(); renderLegend(s); renderOdd(s, known); renderCheckpoints(s);
  if (s.root !== root) { root = s.root; after = 0; items.clear(); $("incidents").replaceChildren(); }
  if (s.newest !== after) fetchIncidents(s.newest);
}
function renderOpen(s, newest) {
  const was = !$("open").hidden;
  show("open", s.open);
  if (!s.open) { if (was) put("news", "The incident is over."); return; }
  put("open-title", `Incident ${s.incident} in progress, for ${span(s.open.since_s)}`);
  put("open-reason", s.open.reason);
  if (!was) put("news", `Incident ${s.incident}: ${s.open.reason}`);
  const at = STAGES.indexOf(s.stage), stages = at < 0 ? [...STAGES, s.stage] : STAGES, current = at < 0 ? STAGES.length : at;
  $("stages").replaceChildren(...stages.filter((stage) => stage !== "proceeding" || s.stage === stage).map((stage) => {
    const item = make("li", stage, stages.indexOf(stage) < current ? "done" : "");
    if (stages.indexOf(stage) === current) item.setAttribute("aria-current", "step");
    return item;
  }));
  const of = newest && s.open.bytes <= newest.bytes ? ` (the newest checkpoint has ${size(newest.bytes)})` : "";
  put("open-bytes", s.open.bytes ? `${size(s.open.bytes)} written${s.open.rate ? `, ${size(s.open.rate)}/s` : ""}${of}` : "nothing written yet");
  const fits = newest && s.open.bytes && s.open.bytes <= newest.bytes;
  show("progress", fits);
  if (fits) $("progress").value = Math.min(1, s.open.bytes / newest.bytes);
}
function renderLegend(s) {
  const counts = {};
  for (const letter of s.phase) counts[letter] = (counts[letter] || 0) + 1;
  let alone = 0, odd = 0;
  for (const flag of s.flag) { alone += flag & 1; odd += (flag & 2) / 2; }
  const entries = PHASES.filter(([letter]) => counts[letter]).map(([letter, word]) => [letter, letter, `${word}: ${counts[letter]}`]);
  if (alone) entries.push(["ring", "", `only holder of a part of the state, may not die: ${alone}`]);
  if (odd) entries.push(["corner", "", `slow, silent, or long in one line: ${odd}`]);
  if (JSON.stringify(entries) === drawn) return;
  drawn = JSON.stringify(entries);
  $("legend").replaceChildren(...entries.map(([kind, letter, text]) => {
    const item = make("li"), mark = make("i", letter, kind);
    mark.setAttribute("aria-hidden", "true");
    if (letter) mark.style.background = `var(--${COLOUR[letter] || letter})`;
    item.append(mark, text);
    return item;
  }));
}
function renderOdd(s, known) {
  put("fine", known ? `All ${plural(s.world, "rank")} are as they should be.` : "No rank has told anything yet.");
  show("fine", !s.odd.length); show("odd", s.odd.length);
  const rows = s.odd.map((one) => {
    const [word, kind] = KINDS[one.kind], row = make("tr");
    const what = make("td", one.kind === "slow" ? `slow, by ${Math.round(one.slower * 100)}%` : word, kind);
    row.append(what, make("td", one.ranks), make("td", one.where, "where"), make("td", one.step), make("td", one.host),
      make("td", one.kind === "unregistered" ? "" : one.heard_s ? `${span(one.heard_s)} ago` : "just now"));
    return row;
  });
  if (s.more) { const row = make("tr"), cell = make("td", `and ${s.more} more`); cell.colSpan = 6; row.append(cell); rows.push(row); }
  $("odd").tBodies[0].replaceChildren(...rows);
}
function renderCheckpoints(s) {
  show("none", !s.checkpoints.length); show("checkpoints", s.checkpoints.length);
  $("checkpoints").tBodies[0].replaceChildren(...s.checkpoints.map((one) => {
    const row = make("tr");
    const word = !one.complete ? [`no: ${one.why}`, "bad"] : one.exact ? ["exact", "good"] : ["not exact", "warn"];
    row.append(make("td", one.step || ""), make("td", one.kind), make("td", one.unix_s ? span(now() - one.unix_s) : ""),
      make("td", one.bytes ? size(one.bytes) : ""), make("td", ...word), make("td", one.name, "name"));
    return row;
  }));
}

// ---------------------------------------------------------------- the grid
function draw() {
  const canvas = $("grid"), s = state, ratio = window.devicePixelRatio || 1, width = Math.floor(canvas.parentElement.clientWidth - 2 * parseFloat(getComputedStyle(canvas.parentElement).paddingLeft));
  if (!s || width <= 0) return;
  const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const ranks = s.phase.length, widest = Math.max(1, ...s.hosts.map(([, count]) => count)), few = s.hosts.length === 1;
  const cell = Math.max(CELL_MIN, Math.min(CELL_MAX, Math.floor(Math.sqrt((width * 420) / Math.max(1, ranks)) - 3)));
  const label = few ? 0 : LABEL, per = Math.max(1, Math.min(widest, Math.floor((width - label) / cell)));
  const block = label + per * cell + (few ? 0 : GAP), columns = Math.max(1, Math.floor((width + GAP) / block));
  const places = [];
  let line = 0, column = 0, rank = 0, tallest = 1;
  for (const [host, count] of s.hosts) {
    if (column === columns) { column = 0; line += tallest; tallest = 1; }
    places.push([host, column * block, line * (cell + 3)]);
    for (let k = 0; k < count; k++, rank++) cells[rank] = [column * block + label + (k % per) * cell, (line + Math.floor(k / per)) * (cell + 3)];
    tallest = Math.max(tallest, Math.ceil(count / per));
    column++;
  }
  cells.length = ranks;
  const height = ranks ? (line + tallest) * (cell + 3) + 2 : 0;
  canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`; canvas.style.width = `${width}px`;
  canvas.dataset.cell = cell;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.textBaseline = "middle";
  const fill = Object.fromEntries(PHASES.map(([letter]) => [letter, colour(COLOUR[letter] || letter)]));
  pen.fillStyle = colour("faint");
  pen.font = "10px ui-monospace, 'DejaVu Sans Mono', monospace";
  if (!few) for (const [host, x, y] of places) pen.fillText(host || "–", x, y + cell / 2);
  pen.textAlign = "center";
  pen.font = `700 ${Math.round(cell * 0.55)}px ui-monospace, 'DejaVu Sans Mono', monospace`;
  const on = colour("on"), onDead = colour("on-dead"), ring = colour("ring"), odd = colour("odd"), border = colour("line"), accent = colour("accent");
  cells.forEach(([x, y], at) => {
    const letter = s.phase[at], flag = Number(s.flag[at]), side = cell - 2;
    if (letter === "-") { pen.strokeStyle = border; pen.lineWidth = 1; pen.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1); }
    else { pen.fillStyle = fill[letter]; pen.fillRect(x, y, side, side); }
    pen.fillStyle = letter === "X" ? onDead : on;
    pen.fillText(letter === "-" ? "·" : letter, x + side / 2, y + side / 2 + 0.5);
    if (flag & 2) { pen.fillStyle = odd; pen.beginPath(); pen.moveTo(x + side * 0.55, y); pen.lineTo(x + side, y); pen.lineTo(x + side, y + side * 0.45); pen.fill(); }
    if (flag & 1) { pen.strokeStyle = ring; pen.lineWidth = 2; pen.strokeRect(x + 1, y + 1, side - 2, side - 2); }
    if (at === picked) { pen.strokeStyle = accent; pen.lineWidth = 3; pen.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1); }
  });
}
async function details(rank) {
  picked = rank;
  draw();
  if (!(rank >= 0 && state && rank < state.world)) { put("details", state && state.world ? `There are ranks 0 to ${state.world - 1}.` : "There is no rank yet."); return; }
  try {
    const one = (await (await get(`state.json?rank=${rank}`)).json()).ranks[0];
    if (rank !== picked) return;
    if (!one.process) { put("details", "not registered"); return; }
    const words = [one.dead ? "dead" : one.connected ? "connected" : "connection lost", `process ${one.process.pid}`, `host ${one.process.host_id.slice(0, 8)}`, one.stand];
    if (one.work_s) words.push(`works ${span(one.work_s)} a step`);
    if (one.slower) words.push(`slower than its peers by ${Math.round(one.slower * 100)}%`);
    if (one.waits_at || one.stands_at) words.push(one.waits_at ? `waits for others at ${one.waits_at}` : `at ${one.stands_at}`);
    if (one.sole_holder) words.push("only holder of a part of the state");
    put("details", `${words.join(", ")}; heard ${one.heard_s < 1 ? "just now" : `${span(one.heard_s)} ago`}`);
  } catch (error) { put("details", error.message); }
}
$("pick").addEventListener("input", (event) => details(event.target.value === "" ? -1 : event.target.valueAsNumber));
$("grid").addEventListener("click", (event) => {
  const cell = Number($("grid").dataset.cell);
  const found = cells.findIndex(([x, y]) => event.offsetX >= x && event.offsetX < x + cell && event.offsetY >= y && event.offsetY < y + cell);
  if (found >= 0) { $("pick").value = found; details(found); }
});
new ResizeObserver(() => {
  draw();
  for (const old of document.querySelectorAll("#incidents svg")) if (Number(old.getAttribute("width")) !== room()) old.replaceWith(picture(old.item));
}).observe(document.querySelector("main"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());

// ---------------------------------------------------------------- incidents
async function fetchIncidents(newest) {
  const from = newest < after ? 0 : after;
  if (!from) items = new Map();
  after = newest;
  try {
    for (const item of await (await get(`incidents.json?after=${from}`)).json()) {
      items.delete(item.key);
      items.set(item.key, item);
      if (from) put("news", item.words);
    }
  } catch { after = from; return; }
  const newestFirst = [...items.values()].reverse().slice(0, INCIDENTS_MAX);
  show("calm", !newestFirst.length); show("bars", newestFirst.length);
  $("incidents").replaceChildren(...newestFirst.map((item, place) => article(item, place < 3)));
}
function article(item, isOpen) {
  const found = make("article"), head = make("h3"), [word, kind] = OUTCOMES[item.outcome];
  head.append(item.unix_s ? new Date(item.unix_s * 1000).toLocaleString("sv-SE") + " " : "", make("span", word, kind),
    item.outcome === "SAVED" ? ` step ${item.step}, ${size(item.bytes)}` : "", item.healed ? ", trains again" : "");
  found.append(head, make("p", item.words));
  if (isOpen) found.append(picture(item));
  else { const more = make("details"); more.append(make("summary", "Drawing")); more.addEventListener("toggle", () => more.append(picture(item)), {once: true}); found.append(more); }
  return found;
}
const room = () => Math.min(860, Math.max(280, $("incidents").clientWidth));
function picture(item) {
  const svg = (tag, facts, text) => {
    const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(facts)) e.setAttribute(key, value);
    if (text !== undefined) e.textContent = text;
    return e;
  };
  const width = room(), left = 74, row = 20, top = 18 * item.marks.length + 10, bottom = top + row * item.rows.length;
  const begin = -0.08 * item.end_s, end = item.end_s * 1.06, x = (s) => left + ((Math.min(Math.max(s, begin), end) - begin) / (end - begin)) * (width - left);
  const root = svg("svg", {width, height: bottom + 24, role: "img", "aria-label": `Drawing: ${item.words}`});
  item.rows.forEach((one, place) => {
    const y = top + row * place;
    root.append(svg("text", {x: left - 8, y: y + 13, "text-anchor": "end"}, one.name));
    for (const [what, from, until] of one.bars) {
      const a = x(from ?? begin), b = x(until ?? end);
      const bar = svg("rect", {class: what, x: a, y: y + 3, width: Math.max(b - a, 1.5), height: row - 6});
      bar.append(svg("title", {}, BARS[what]));
      root.append(bar);
    }
    if (one.bars.some(([what]) => what === "dead")) root.append(svg("text", {x: x(0), y: y + 15, "text-anchor": "middle"}, "✕"));
  });
  item.marks.forEach(([word, at], place) => {
    const y = 13 + 18 * place, text = `${word} after ${span(at)}`, right = x(at) + LETTER * text.length > width;
    root.append(svg("line", {x1: x(at), x2: x(at), y1: y + 3, y2: bottom}),
      svg("text", {x: x(at) + (right ? -6 : 6), y: y + 2, "text-anchor": right ? "end" : "start"}, text));
  });
  root.append(svg("text", {class: "axis", x: x(0), y: bottom + 16, "text-anchor": "middle"}, "known"),
    svg("text", {class: "axis", x: x(item.end_s), y: bottom + 16, "text-anchor": "end"}, span(item.end_s)));
  root.item = item;
  return root;
}
$("bars").replaceChildren(...Object.entries(BARS).map(([kind, text]) => { const item = make("li"); item.append(make("i", "", kind), text); return item; }));
setInterval(() => { if (state) render(); }, 10000);
listen();
