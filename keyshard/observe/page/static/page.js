// The live page: a stream of looks, and tables and a ring drawn from them. Data enters the document
// as text only.

const SLOTS = 65536;
const HISTORY = 120; // samples of a sparkline, one a second
const ROWS = 20; // rows of a table before "show all"
const AGAIN_MS = 2000;
const HEAT_MIN = 50; // messages or seconds that are hot at least
const RELEASE = document.querySelector("meta[name='release']").content; // of keyshard, as the server served the page

const byId = (id) => document.getElementById(id);
const svgOf = (name) => document.createElementNS("http://www.w3.org/2000/svg", name);

const state = {
  chosen: null, look: null, histories: new Map(), arcs: new Map(), arc: null, all: new Set(),
  sorts: { owners: ["trouble", -1], partitions: ["lag", -1], runs: ["elapsed", -1], dead: ["none", 1], parked: ["none", 1], rescales: ["ago", 1], workers: ["is", 1], consumers: ["problem", -1] },
  runs: [], noRuns: "", stream: null, shown: null, dead: null, letter: null, pressed: null,
};

document.addEventListener("pointerdown", (event) => { state.pressed = event.target; });
// A button is clicked when the space bar is released, too.
document.addEventListener("keydown", (event) => { if (event.key === " ") state.pressed = event.target; });
for (const end of ["pointerup", "pointercancel", "keyup"]) document.addEventListener(end, () => { state.pressed = null; });
window.addEventListener("blur", () => { state.pressed = null; });

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") made.addEventListener("click", value);
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((one) => one !== null && one !== undefined));
  return made;
}

// -- Texts -----------------------------------------------------------------------------------------

const numberOf = (value) =>
  value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
const paceOf = (value) =>
  value === null ? "–" : value >= 10 || value === 0 ? numberOf(value) : value.toFixed(1);

function durationOf(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

const nameOf = (partition) =>
  (partition.partition < 0 ? partition.topic : `${partition.topic}-partition-${partition.partition}`)
    .replace(/^persistent:\/\/(public\/default\/)?/, "");
const keyOf = (key) => (key === null ? "(no key)" : key);

// -- Requests --------------------------------------------------------------------------------------

function token() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem("token");
}

function headersOf() {
  const known = token();
  return known ? { Authorization: `Bearer ${known}` } : {};
}

async function ask(command, fields = {}, source = state.look?.chosen) {
  const answer = await fetch("/api/ask", {
    method: "POST",
    headers: { ...headersOf(), "Content-Type": "application/json" },
    body: JSON.stringify({ source, do: command, ...fields }),
  });
  if (answer.status === 401) askForToken();
  if (answer.headers.get("content-type")?.startsWith("application/json")) {
    const told = await answer.json();
    if (told.ok) return told.result;
    throw new Error(`${told.error} (${told.code})`);
  }
  throw new Error((await answer.text()).trim());
}

async function listen() {
  const stop = new AbortController();
  state.stream?.abort();
  state.stream = stop;
  while (!stop.signal.aborted) {
    try {
      const query = state.chosen ? `?source=${encodeURIComponent(state.chosen)}` : "";
      const answer = await fetch(`/api/events${query}`, { headers: headersOf(), signal: stop.signal });
      if (answer.status === 401) return askForToken();
      if (!answer.ok) throw new Error((await answer.text()).trim());
      live(true);
      await readEvents(answer.body.getReader());
      throw new Error("the connection has ended");
    } catch (error) {
      if (stop.signal.aborted) return;
      live(false, error.message);
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }
}

async function readEvents(reader) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const events = text.split("\n\n");
    text = events.pop();
    const newest = events.filter((one) => one.startsWith("data: ")).pop();
    if (newest) show(JSON.parse(newest.slice(6)));
  }
}

function live(is, why = "") {
  const link = byId("link");
  link.className = is ? "live" : "";
  link.textContent = is ? "live" : `not connected: ${why}; trying again`;
}

function askForToken() {
  live(false, "a token is required");
  sessionStorage.removeItem("token"); // further requests with it would count as guesses
  state.look = null;
  byId("main").hidden = byId("other").hidden = true;
  byId("token").hidden = false;
  byId("token").token.focus();
}

byId("token").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", byId("token").token.value);
  byId("token").hidden = true;
  listen();
});

// -- A look ----------------------------------------------------------------------------------------

// The server may have been replaced by another release since the page was loaded.
function show(look) {
  const notes = [look.error, look.release === RELEASE ? "" : `This page is of keyshard ${RELEASE}, and its ` +
    `server runs ${releaseOf(look)}. Reload the page.`].filter(Boolean);
  byId("notice").hidden = !notes.length;
  byId("notice").textContent = notes.join(" ");
  try { drawLook(look); } catch (error) {
    if (look.release === RELEASE) throw error;
  }
}

const releaseOf = (one) => (one.release ? `keyshard ${one.release}` : "an unknown release of keyshard");

// Why a status cannot be drawn: it may be of another release than the page.
function undrawn(look, error) {
  const one = [...look.sources, ...look.sinks, ...look.workers].find((each) => each.id === look.chosen);
  return `${error.message}.` + (!one || one.release === RELEASE ? "" : ` It runs ${releaseOf(one)}, and this page ` +
    `is of keyshard ${RELEASE}. Use the same release for both.`);
}

function drawLook(look) {
  state.look = look;
  if (state.shown !== look.chosen) {
    // Another source: rows of the one before must not act on it.
    Object.assign(state, { shown: look.chosen, arc: null, runs: [], noRuns: "", dead: null });
    showDead();
  }
  showSources(look);
  showOthers(look);
  const status = look.status;
  const other = otherOf(look);
  byId("main").hidden = !status || other !== null;
  byId("other").hidden = other === null;
  if (!status) {
    document.title = "keyshard";
    if (!look.sources.length && !look.sinks.length && !look.workers.length) byId("sources").replaceChildren("Nothing runs on this machine.");
    return;
  }
  if (other !== null) return showOther(other, look, status);
  document.title = `${status.name} - keyshard`;
  try { showSource(look, status); } catch (error) {
    // A status of another release that cannot be drawn must not end the page.
    byId("notice").hidden = false;
    byId("notice").textContent = `The status of ${status.name} cannot be shown: ${undrawn(look, error)}`;
  }
}

function showSource(look, status) {
  remember(look.chosen, status);
  showFacts(status);
  showRing(status);
  showOwners(status);
  showWorkers(status);
  showPartitions(status);
  showHistory(status.history);
  showParked(status);
  byId("now").hidden = byId("letters").hidden = status.kind !== "handlers";
  byId("pause").hidden = status.state === "paused";
  byId("resume").hidden = status.state !== "paused";
  byId("moves").hidden = status.kind === "spark" || status.kind === "stream";
}

function historyOf(source, partition) {
  return `${source} ${nameOf(partition)} ${partition.lag.rows === null ? "seconds" : "rows"}`;
}

function remember(source, status) {
  for (const partition of status.partitions) {
    const name = historyOf(source, partition);
    const lag = partition.lag.rows ?? partition.lag.seconds;
    if (lag !== null) state.histories.set(name, [...(state.histories.get(name) ?? []), lag].slice(-HISTORY));
  }
}

function showSources(look) {
  const buttons = look.sources.map((one) => {
    const is = one.error ? "lost" : one.state;
    const lag = one.error ? one.error : `${one.kind}, ${lagOf(one.lag)}`;
    return element("button", {
      type: "button", title: one.error || `${one.subscription}, pid ${one.pid}`,
      "aria-current": String(one.id === look.chosen),
      onclick: () => choose(one.id),
    }, element("span", { class: `state ${is}` }), one.name, " ", element("small", {}, lag));
  });
  const nav = byId("sources");
  const focused = [...nav.children].indexOf(document.activeElement);
  nav.replaceChildren(...buttons);
  if (focused >= 0) nav.children[focused]?.focus();
}

function choose(id) {
  Object.assign(state, { chosen: id, arc: null, runs: [], noRuns: "", dead: null });
  showDead();
  listen();
}

const lagOf = (lag) =>
  [
    lag.rows === null ? null : `${numberOf(lag.rows)} rows`,
    lag.seconds === null ? null : durationOf(lag.seconds),
  ].filter(Boolean).join(", ") || "lag unknown";

const fact = (name, value, note = "", kind = "") =>
  element("div", { class: kind }, element("dt", {}, name),
    element("dd", {}, value, " ", element("small", {}, note)));

function showFacts(status) {
  const { lag, rates, counters } = status;
  const trend = element("span", { class: lag.trend ?? "" }, lag.trend ?? "");
  const handles = status.kind === "handlers";
  byId("facts").replaceChildren(...[
    stateFact(status),
    fact("Lag", durationOf(lag.seconds), element("span", {}, trend, " ", byBroker(lag))),
    fact("Backlog", numberOf(lag.rows ?? lag.entries),
      lag.rows !== null ? "rows" : lag.entries !== null ? "entries" : `unknown: ${status.partitions.find((one) => one.unknown)?.unknown ?? "it starts"}`),
    fact("Received", paceOf(rates.received), "rows/s"),
    counters.completed === null ? null : fact("Completed", paceOf(rates.completed), "messages/s"),
    counters.failedAttempts === null ? null : fact("Failed attempts", paceOf(rates.failedAttempts), "per second"),
    handles ? fact("Parked keys", numberOf(status.parkedKeys), `dead letters: ${numberOf(counters.deadLettered)}`) : null,
    status.window?.segmentsWaiting
      ? fact("Segments waiting", numberOf(status.window.segmentsWaiting), "for their parents")
      : null,
    uptimeFact(status),
    status.hotKeys?.length
      ? fact("Hot keys", status.hotKeys.map((one) => `${keyOf(one.key).slice(0, 60)} ${(one.share * 100).toFixed(1)} %`).join(", "), "of messages", "wide")
      : null,
    fact("Subscription", status.subscription, `${status.topicsPattern ?? status.topics.map((one) => nameOf({ topic: one, partition: -1 })).join(", ")} at ${status.serviceUrl}`, "wide"),
    errorFact(status),
  ].filter(Boolean));
}

const stateFact = (status) =>
  fact("State", element("span", { class: `state ${status.state}` }, status.state), status.kind);
const uptimeFact = (status) =>
  fact("Uptime", durationOf(status.uptimeSeconds), `pid ${status.pid} on ${status.host}`);
const errorFact = ({ newestError }) => (newestError
  ? fact("Newest error", element("span", { class: "bad" }, newestError.error),
    newestError.secondsAgo === null ? "persists" : `${durationOf(newestError.secondsAgo)} ago`, "wide")
  : null);

// -- Sinks and workers -----------------------------------------------------------------------------

// Decided by the list and not by the status, which may be of another release.
const otherOf = (look) =>
  ["sink", "worker"].find((kind) => look[`${kind}s`].some((one) => one.id === look.chosen)) ?? null;

function showOthers(look) {
  const groups = [
    ["open-sinks", look.sinks, (one) => `sink, ${numberOf(one.unconfirmed?.messages)} unconfirmed`],
    ["host-workers", look.workers, (one) => `worker, pid ${one.pid}`],
  ];
  for (const [id, found, note] of groups) {
    const nav = byId(id);
    nav.hidden = !found.length;
    if (state.pressed && nav.contains(state.pressed)) continue; // a click needs its button until it ends
    const focused = document.activeElement?.closest?.(`#${id} button`)?.dataset.of;
    nav.replaceChildren(...found.map((one) => element("button", {
      type: "button", title: one.error || `pid ${one.pid}`, "data-of": one.id,
      "aria-current": String(one.id === look.chosen), onclick: () => choose(one.id),
    }, element("span", { class: `state ${one.error ? "lost" : one.state}` }), one.name, " ",
    element("small", {}, one.error || note(one)))));
    if (focused) [...nav.querySelectorAll("button")].find((one) => one.dataset.of === focused)?.focus();
  }
}

// A status that cannot be drawn must not end the page.
function showOther(kind, look, status) {
  document.title = `${status.name} - keyshard`;
  byId("published").hidden = kind !== "sink";
  byId("hosted").hidden = kind !== "worker";
  const draw = kind === "sink" ? showSink : showWorker;
  try {
    draw(status);
  } catch (error) {
    byId("other-facts").replaceChildren(fact("Status", "It cannot be shown.", undrawn(look, error), "wide"));
    byId("published").hidden = byId("hosted").hidden = true;
  }
}

function showSink(status) {
  const { rates, counters, unconfirmed } = status;
  const oldest = unconfirmed.oldestSeconds === null ? "" : `, oldest ${durationOf(unconfirmed.oldestSeconds)}`;
  byId("other-facts").replaceChildren(...[
    stateFact(status),
    fact("Unconfirmed", numberOf(unconfirmed.messages), `messages, ${numberOf(unconfirmed.bytes)} bytes${oldest}`),
    fact("Published", paceOf(rates.published), `messages/s, total ${numberOf(counters.published)}`),
    fact("Confirmed", paceOf(rates.confirmed), `messages/s, total ${numberOf(counters.confirmed)}`),
    fact("Bytes", paceOf(rates.bytes), `per second, total ${numberOf(counters.bytes)} in ${numberOf(counters.entries)} entries`),
    fact("Failed", element("span", { class: counters.failed ? "bad" : "" }, numberOf(counters.failed)), "messages"),
    fact("Batches", numberOf(counters.batches), `already stored: ${numberOf(counters.alreadyStored)} rows`),
    fact("Guarantee", status.deliveryGuarantee, status.transport),
    uptimeFact(status),
    fact("Sink", status.name, `default topic ${status.topic} at ${status.serviceUrl}`, "wide"),
    errorFact(status),
  ].filter(Boolean));
  byId("topics").replaceChildren(...(status.topics.length ? status.topics : ["No message was published yet."])
    .map((topic) => element("li", {}, nameOf({ topic, partition: -1 }))));
}

function showWorker(status) {
  const { waiting, kept, consumers, source } = status;
  const troubled = consumers.filter((one) => one.problem || !one.connected).length;
  byId("other-facts").replaceChildren(...[
    stateFact(status),
    fact("Consumers", numberOf(consumers.length), troubled ? `${numberOf(troubled)} in trouble` : "all connected"),
    fact("Waiting", numberOf(waiting.messages), `messages, ${numberOf(waiting.entries)} entries, ${numberOf(waiting.bytes)} bytes`),
    fact("Kept", numberOf(kept.messages), `messages, ${numberOf(kept.bytes)} bytes`),
    fact("Source", `pid ${source.pid}`, `on ${source.host}`),
    uptimeFact(status),
    fact("Worker of", status.subscription, `at ${status.serviceUrl}`, "wide"),
    errorFact(status),
  ].filter(Boolean));
  table("consumers", [
    ["topic", "Topic partition", nameOf, nameOf, "text"],
    ["slots", "Slots", (one) => Number(one.hashRange.split("-")[0]), (one) => one.hashRange, ""],
    ["problem", "Problem", (one) => (one.problem ? 2 : one.connected ? 0 : 1),
      (one) => element("span", { class: one.connected && !one.problem ? "" : "bad" },
        one.problem || (one.connected ? "–" : "not connected")), "text"],
    ["messages", "Messages", (one) => one.messages, (one) => numberOf(one.messages), "number"],
    ["bytes", "Bytes", (one) => one.bytes, (one) => numberOf(one.bytes), "number"],
  ], status.consumers, ROWS, "The worker has no consumer.");
}

// -- The ring --------------------------------------------------------------------------------------

const HEATS = {
  messages: (range) => (range.waiting === null ? null : range.waiting + range.inFlight),
  oldest: (range) => (range.waiting === null ? null : (range.oldestUnacknowledgedMillis ?? 0) / 1000),
  busy: (range) => range.shares?.busy ?? null,
  held: (range) => range.shares?.heldBack ?? null,
}; // null if the number is unknown
const TROUBLE = { stalled: 3, disconnected: 3, blocked: 2, paused: 1, draining: 1 };

function pathOf(first, last) {
  const point = (slot, radius) => {
    const angle = (slot / SLOTS) * 2 * Math.PI - Math.PI / 2;
    return `${(radius * Math.cos(angle)).toFixed(3)} ${(radius * Math.sin(angle)).toFixed(3)}`;
  };
  const middle = (first + last + 1) / 2; // two arcs: one alone cannot be a full circle
  const end = last + 1;
  return `M${point(first, 104)} A104 104 0 0 1 ${point(middle, 104)} A104 104 0 0 1 ${point(end, 104)} ` +
    `L${point(end, 66)} A66 66 0 0 0 ${point(middle, 66)} A66 66 0 0 0 ${point(first, 66)} Z`;
}

function colourOf(heat, range) {
  if (TROUBLE[range.state] === 3) return "var(--bad)";
  if (TROUBLE[range.state] === 2) return "var(--warn)";
  if (heat === null) return "url(#unknown)";
  return `color-mix(in oklab, var(--accent) ${Math.round(heat * 100)}%, var(--cold))`;
}

function showRing(status) {
  const heatName = byId("heat").value;
  const values = status.ranges.map(HEATS[heatName]);
  const isShare = heatName === "busy" || heatName === "held";
  const most = Math.max(HEAT_MIN, ...values);
  const heatOf = (value) => (value === null || isShare ? value : Math.log1p(value) / Math.log1p(most));
  const seen = new Set();
  status.ranges.forEach((range, at) => {
    for (const text of range.hashRanges) {
      const name = `${state.look.chosen} ${range.index} ${text}`;
      seen.add(name);
      let path = state.arcs.get(name);
      if (!path) {
        const [first, last] = text.split("-").map(Number);
        path = svgOf("path");
        path.setAttribute("d", pathOf(first, last ?? first));
        path.setAttribute("role", "option");
        path.setAttribute("tabindex", "-1");
        path.addEventListener("click", () => chooseArc(path));
        path.dataset.range = range.index;
        path.dataset.first = first;
        state.arcs.set(name, path);
        byId("arcs").append(path);
      }
      path.style.fill = colourOf(heatOf(values[at]), range);
      path.classList.toggle("chosen", state.arc === range.index);
      path.setAttribute("aria-selected", String(state.arc === range.index));
      path.setAttribute("aria-label", arcText(range));
      if (!path.firstChild) path.append(svgOf("title"));
      path.firstChild.textContent = arcText(range);
    }
  });
  const focused = byId("arcs").contains(document.activeElement);
  for (const [name, path] of state.arcs) {
    if (!seen.has(name)) { path.remove(); state.arcs.delete(name); }
  }
  if (!byId("arcs").querySelector("[tabindex='0']")) reach(arcsInOrder()[0], focused);
  byId("arcs").setAttribute("aria-label", `${numberOf(status.ranges.length)} hash ranges by load, epoch ${status.epoch}`);
  const texts = [[`${numberOf(status.ranges.length)} ranges`, -4, ""], [`epoch ${status.epoch}`, 14, "soft"]];
  byId("arcs").querySelectorAll("text").forEach((one) => one.remove());
  for (const [text, y, kind] of texts) {
    const made = svgOf("text");
    made.textContent = text;
    made.setAttribute("y", y);
    made.setAttribute("class", kind);
    made.setAttribute("aria-hidden", "true"); // the label has it
    byId("arcs").append(made);
  }
  const chosen = status.ranges.find((range) => range.index === state.arc);
  byId("arc").textContent = chosen ? arcText(chosen) : "Choose a range to see its owner: by a click, or by arrow keys and Enter.";
}

// Tab reaches one arc, and arrow keys move from it along the ring: there may be thousands.
const arcsInOrder = () => [...state.arcs.values()].sort((one, other) => one.dataset.first - other.dataset.first);

function reach(path, focus) {
  byId("arcs").querySelectorAll("[tabindex='0']").forEach((one) => one.setAttribute("tabindex", "-1"));
  path?.setAttribute("tabindex", "0");
  if (focus) path?.focus();
}

function chooseArc(path) {
  state.arc = Number(path.dataset.range);
  reach(path, false);
  show(state.look);
}

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

byId("arcs").addEventListener("keydown", (event) => {
  const arcs = arcsInOrder();
  const at = arcs.indexOf(event.target);
  if (at < 0 || event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "Enter" || event.key === " ") chooseArc(event.target);
  else if (event.key === "Home" || event.key === "End") reach(arcs.at(event.key === "Home" ? 0 : -1), true);
  else if (event.key in STEPS) reach(arcs[(at + STEPS[event.key] + arcs.length) % arcs.length], true);
  else return;
  event.preventDefault();
});

const arcText = (range) =>
  `Range ${range.index} (${range.hashRanges.join(" ")}) of ${range.owner}: ${range.state}` +
  (range.stalled ? ` (${range.stalled.kind}), ` : ", ") +
  `${numberOf(range.waiting)} waiting, ${numberOf(range.inFlight)} in flight` +
  (range.blockedBy ? `, blocked by ${keyOf(range.blockedBy.key)}` : "") +
  (range.reason ? `: ${range.reason}` : "");

byId("heat").addEventListener("change", () => state.look && show(state.look));

// -- Tables ----------------------------------------------------------------------------------------

const elementOf = (where, of) => [...where.querySelectorAll("[data-of]")].find((one) => one.dataset.of === of);

// A column: [name, title, value to sort by, cell, class of the cell]
function table(id, columns, rows, limit, empty) {
  const shown = byId(id);
  const [by, direction] = state.sorts[id];
  const column = columns.find(([name]) => name === by) ?? columns[0];
  const sorted = [...rows].sort((one, other) => {
    const [left, right] = [column[2](one) ?? -1, column[2](other) ?? -1];
    return (left < right ? -1 : left > right ? 1 : 0) * direction;
  });
  if (state.pressed && shown.contains(state.pressed)) return; // a click needs its button until it ends
  const focused = document.activeElement?.closest?.(`#${id} th`)?.dataset.name;
  const inside = document.activeElement?.closest?.(`#${id} td`) && document.activeElement.dataset.of;
  const heads = columns.map(([name, title, , , kind]) => element("th", {
    class: kind, scope: "col", "data-name": name,
    "aria-sort": name === by ? (direction > 0 ? "ascending" : "descending") : null,
  }, element("button", {
    type: "button", onclick: () => { state.sorts[id] = [name, name === by ? -direction : -1]; if (state.look) show(state.look); showRuns(); showDead(); },
  }, title)));
  const all = state.all.has(id);
  const body = (all ? sorted : sorted.slice(0, limit)).map((row) =>
    element("tr", {}, ...columns.map(([, , , cell, kind]) => element("td", { class: kind }, cell(row)))));
  if (!rows.length) body.push(element("tr", {}, element("td", { class: "empty", colspan: columns.length }, empty)));
  const before = shown.parentElement.scrollTop;
  shown.replaceChildren(element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...body));
  shown.parentElement.scrollTop = before;
  if (focused) shown.querySelector(`th[data-name="${focused}"] button`)?.focus();
  if (inside) (elementOf(shown, inside) ?? shown.querySelector("th button")).focus();
  const more = byId(`all-${id}`);
  if (more) {
    more.hidden = rows.length <= limit;
    more.textContent = all ? `Show the first ${limit}` : `Show all ${numberOf(rows.length)}`;
    more.onclick = () => { if (!state.all.delete(id)) state.all.add(id); show(state.look); };
  }
}

function showOwners(status) {
  table("owners", [
    ["index", "Range", (range) => range.index, (range) => String(range.index), "number"],
    ["trouble", "State", (range) => (TROUBLE[range.state] ?? 0) * 1e12 + (range.reason ? 1e9 : 0) + HEATS.messages(range),
      (range) => element("span", { class: `state ${range.state}` }, range.state), ""],
    ["waiting", "Waiting", (range) => range.waiting, (range) => numberOf(range.waiting), "number"],
    ["flight", "In flight", (range) => range.inFlight, (range) => numberOf(range.inFlight), "number"],
    ["oldest", "Oldest", (range) => range.oldestUnacknowledgedMillis,
      (range) => durationOf(range.oldestUnacknowledgedMillis === null ? null : range.oldestUnacknowledgedMillis / 1000), "number"],
    ["shares", "Busy, waiting, held back", (range) => range.shares?.busy, (range) => sharesOf(range.shares), ""],
    ["reason", "Blocked by", (range) => range.reason,
      (range) => element("span", {}, range.reason, " ", runbookOf(range.stalled, `range ${range.index}`)), "text"],
  ], status.ranges, ROWS, "The source has no range yet.");
}

// The server has the runbook as text: a page is also read where no site of the documentation is.
function runbookOf(stalled, of) {
  if (!stalled) return null;
  const href = `/runbook/keyshardstalled${stalled.kind.replaceAll("-", "")}`;
  return element("a", { href, target: "_blank", rel: "noopener", "data-of": `${of} ${stalled.kind}` },
    `runbook: ${stalled.kind}`);
}

// A drawing has its numbers as the title for a pointer, and as its name for other readers.
function named(drawing, text) {
  const title = svgOf("title");
  title.textContent = text;
  drawing.prepend(title);
  drawing.setAttribute("role", "img");
  drawing.setAttribute("aria-label", text);
  return drawing;
}

function barOf(kind, parts) {
  const bar = svgOf("svg");
  bar.setAttribute("class", kind);
  bar.setAttribute("viewBox", "0 0 100 10");
  bar.setAttribute("preserveAspectRatio", "none");
  const whole = parts.reduce((sum, [, size]) => sum + size, 0) || 1;
  let from = 0;
  for (const [name, size] of parts) {
    const part = svgOf("rect");
    part.setAttribute("class", name);
    part.setAttribute("x", from);
    part.setAttribute("width", (100 * size) / whole);
    part.setAttribute("height", 10);
    from += (100 * size) / whole;
    bar.append(part);
  }
  return bar;
}

function sharesOf(shares) {
  if (!shares) return "–";
  const parts = ["busy", "waiting", "heldBack"].map((name) => [name, shares[name]]);
  return named(barOf("bar", parts), parts.map(([name, share]) =>
    `${name === "heldBack" ? "held back" : name} ${Math.round(share * 100)} %`).join(", "));
}

// Handlers have slots; a worker that hosts consumers has consumers.
function showWorkers(status) {
  const placeOf = (one) => (one.pid === null ? "no process" : `pid ${one.pid} on ${one.host}`);
  const handling = status.handlerSlots.map((one) => ({
    ...one, is: `handlers: ${status.executor}`, where: placeOf(one),
    free: one.total === null ? null : one.total - one.used, seconds: one.runningSeconds, gone: false,
    state: one.stalled ? "stalled" : one.state,
  }));
  const hosting = (status.window?.sourceWorkers ?? []).map((one) => ({
    is: `consumers: ${one.kind}`, where: one.pid === null ? "gone" : `pid ${one.pid} on ${one.host}`,
    used: one.consumers, free: null, seconds: one.forSeconds, restarts: one.restarts, gone: one.pid === null,
    index: null, state: "", stalled: null, waiting: null, inFlight: null, handled: null, hashRange: null,
  }));
  byId("working").hidden = !handling.length && !hosting.length;
  table("workers", [
    ["is", "Of", (one) => one.is, (one) => one.is, "text"],
    ["where", "Where", (one) => one.where, (one) => element("span", { class: one.gone ? "bad" : "" }, one.where), "text"],
    ["used", "Used", (one) => one.used, (one) => numberOf(one.used), "number"],
    ["free", "Free", (one) => one.free, (one) => numberOf(one.free), "number"],
    ["share", "Share", (one) => one.used, (one) => (one.free === null ? "–"
      : named(barOf("bar", [["busy", one.used], ["free", one.free]]), `${numberOf(one.used)} used, ${numberOf(one.free)} free`)), ""],
    ["state", "State", (one) => one.state, (one) => element("span", { class: one.stalled ? "bad" : "" },
      one.state, one.stalled ? `: ${one.stalled.reason} ` : "", runbookOf(one.stalled, `actor ${one.index}`)), "text"],
    ["seconds", "For", (one) => one.seconds, (one) => durationOf(one.seconds), "number"],
    ["waiting", "Waiting", (one) => one.waiting, (one) => numberOf(one.waiting), "number"],
    ["inFlight", "In flight", (one) => one.inFlight, (one) => numberOf(one.inFlight), "number"],
    ["handled", "Handled", (one) => one.handled, (one) => numberOf(one.handled), "number"],
    ["restarts", "Restarts", (one) => one.restarts, (one) => numberOf(one.restarts), "number"],
    ["slots", "Slots of the ring", (one) => one.index, (one) => one.hashRange ?? "–", "text"],
  ], [...handling, ...hosting], ROWS, "");
}

function showPartitions(status) {
  const limited = (count, most, one) => {
    const near = count !== null && most && count >= most / 2;
    const [title, mark] = one.limitsAssumed
      ? ["The role may not read the configuration of the broker: this is the default of its release.", " ?"] : [one.unknown || null, ""];
    return element("span", { class: near ? "warn" : "", title }, `${numberOf(count)} / ${numberOf(most)}${mark}`);
  };
  table("partitions", [
    ["name", "Topic partition", nameOf, nameOf, "text"],
    ["lag", "Lag", (one) => one.lag.seconds, lagAgeOf, "number"],
    ["rows", "Rows", (one) => one.lag.rows, (one) => element("span", { title: one.unknown || null }, numberOf(one.lag.rows)), "number"],
    ["trend", "Trend", (one) => one.lag.trend, (one) => element("span", { class: one.lag.trend ?? "" }, one.lag.trend ?? "–"), ""],
    ["spark", "Last 2 minutes", (one) => one.lag.rows, (one) => sparkOf(state.histories.get(historyOf(state.look.chosen, one)) ?? []), ""],
    ["gaps", "Ack gaps", (one) => one.ackGaps, (one) => limited(one.ackGaps, one.ackGapsMax, one), "number"],
    ["replay", "Replay queue", (one) => one.replay, (one) => limited(one.replay, one.replayMax, one), "number"],
    ["covered", "Ring", (one) => (one.covered ? 0 : 1) + (one.error ? 2 : 0),
      (one) => element("span", { class: one.covered && !one.error ? "" : "bad" },
        one.error || (one.covered ? "whole" : `no consumer: ${one.gaps.slice(0, 3).join(" ")}`)), "text"],
    ["stalled", "Stalled", (one) => one.stalled?.forSeconds ?? 0,
      (one) => element("span", { class: one.stalled ? "bad" : "" },
        one.stalled ? `${durationOf(one.stalled.forSeconds)}: ${one.stalled.reason} ` : "–",
        runbookOf(one.stalled, nameOf(one))), "text"],
  ], status.partitions, ROWS, "The source has no topic partition yet.");
  byId("partitions-note").textContent = unknownIn(status.partitions);
}

// Why numbers of the broker are dashes, also for those who have no pointer for titles.
function unknownIn(partitions) {
  const counts = new Map();
  for (const { unknown } of partitions) if (unknown) counts.set(unknown, (counts.get(unknown) ?? 0) + 1);
  return [...counts].slice(0, 5).map(([why, count]) => `Numbers of the broker` +
    (count < partitions.length ? ` for ${numberOf(count)} of ${numberOf(partitions.length)} topic partitions` : "") +
    ` are unknown (–): ${why}.`).join(" ");
}

function sparkOf(history) {
  const spark = svgOf("svg");
  spark.setAttribute("class", "spark");
  spark.setAttribute("viewBox", `0 0 ${HISTORY} 22`);
  spark.setAttribute("preserveAspectRatio", "none");
  const most = Math.max(1, ...history);
  const line = svgOf("polyline");
  line.setAttribute("points", history.map((value, at) =>
    `${HISTORY - history.length + at},${(20 - (value / most) * 18).toFixed(1)}`).join(" "));
  spark.append(line);
  return named(spark, `${numberOf(history.at(-1))} now, at most ${numberOf(most)}`);
}

// The age by the broker itself, where the broker measures it.
const byBroker = (lag) => (lag.brokerSeconds === null ? "" : `broker: ${durationOf(lag.brokerSeconds)}`);

const lagAgeOf = (partition) => {
  const { lag } = partition;
  const title = lag.seconds === null ? partition.unknown || null : null;
  return element("span", { title }, durationOf(lag.seconds), " ", element("small", {}, byBroker(lag)));
};

// -- The last minutes ------------------------------------------------------------------------------

const MINUTES_S = 300;

function showHistory(history) {
  const { commits, rescales, rescaling, rescaleSummary } =
    history ?? { commits: [], rescales: [], rescaling: null, rescaleSummary: null };
  const most = Math.max(1, ...commits.map((one) => one.entries));
  byId("commits").replaceChildren(...commits.map((one) => {
    const bar = svgOf("rect");
    const height = Math.max(1, (one.entries / most) * 38);
    bar.setAttribute("x", Math.max(0, MINUTES_S - one.secondsAgo));
    bar.setAttribute("y", 40 - height);
    bar.setAttribute("width", 8);
    bar.setAttribute("height", height);
    const title = svgOf("title");
    title.textContent = `${numberOf(one.entries)} entries in ${numberOf(one.commits)} commits, ${durationOf(one.secondsAgo)} ago`;
    bar.append(title);
    return bar;
  }));
  byId("commits").setAttribute("aria-label", "Entries committed in each 10 s of the last 5 minutes: " +
    commits.map((one) => `${numberOf(one.entries)} ${durationOf(one.secondsAgo)} ago`).join(", "));
  const sum = (name) => commits.reduce((total, one) => total + one[name], 0);
  const sizes = commits.filter((one) => one.checkpointBytes !== null);
  byId("commits-text").textContent = history === null ? "" : `${numberOf(sum("commits"))} commits, ${numberOf(sum("entries"))} entries` +
    (sizes.length ? `, checkpoint ${numberOf(sizes.at(-1).checkpointBytes)} bytes` : "");
  byId("rescaling").textContent = rescaling === null ? "" : rescalingOf(rescaling);
  byId("rescale-summary").textContent = summaryOf(rescaleSummary);
  table("rescales", [
    ["ago", "Rescale", (one) => one.secondsAgo, (one) => `${durationOf(one.secondsAgo)} ago`, "number"],
    ["asked", "Asked", (one) => askedOf(one), (one) => askedOf(one), "text"],
    ["ranges", "Ranges", (one) => one.after, (one) => `${numberOf(one.before)} to ${numberOf(one.after)}`, "text"],
    ["end", "End", (one) => one.end, (one) => element("span", { class: one.error ? "bad" : "" }, one.end), "text"],
    ["moved", "Moved", (one) => one.movedFraction, (one) => `${(one.movedFraction * 100).toFixed(1)} % of the ring`, "text"],
    ["took", "Took", (one) => one.durationMillis, (one) => durationOf(one.durationMillis / 1000), "number"],
    ["phases", "Phases", (one) => one.durationMillis, phasesOf, ""],
    ["pause", "Longest pause", (one) => one.pauseMillis, (one) => durationOf(one.pauseMillis === null ? null : one.pauseMillis / 1000), "number"],
    ["error", "Error", (one) => one.error, (one) => one.error, "text"],
  ], rescales, ROWS, "No rescale since the start.");
}

const partsOf = (rescale) => ("actors" in rescale.asked ? "actors" : "ranges");
const askedOf = (rescale) => (rescale.asked.balance ? "balance" : `${numberOf(rescale.asked[partsOf(rescale)])} ${partsOf(rescale)}`);
const millisOf = (millis) => (millis < 1000 ? `${Math.round(millis)} ms` : durationOf(millis / 1000));

function rescalingOf(running) {
  const phase = running.phases.at(-1);
  const waits = running.waitsFor;
  return `A rescale from ${numberOf(running.before)} to ${numberOf(running.after)} ${partsOf(running)} runs for ` +
    `${durationOf(running.forSeconds)}` + (phase ? `, now in ${phase.phase} for ${millisOf(phase.millis)}` : "") +
    (waits === null ? "." : `. It waits at most ${durationOf(running.drainTimeoutSeconds)}, for message ` +
      `${waits.messageId} of key ${keyOf(waits.key)}, whose handler has run for ${durationOf(waits.runningSeconds)}.`);
}

function summaryOf(summary) {
  if (summary === null) return "";
  const counts = ["moved", "unchanged", "kept", "lost"].filter((end) => summary[end])
    .map((end) => `${numberOf(summary[end])} ${end}`);
  if (!counts.length) return "";
  return `Rescales since the start: ${counts.join(", ")}` + (summary.meanMillis === null ? "." :
    `. Those that moved slots took ${millisOf(summary.meanMillis)} on average and ${millisOf(summary.maxMillis)} ` +
    `at most; the longest pause of a range was ${millisOf(summary.maxPauseMillis)}.`);
}

function phasesOf(rescale) {
  const text = rescale.phases.map((one) => `${one.phase} ${millisOf(one.millis)}`).join(", ");
  const bar = barOf("phases", rescale.phases.map((one) => [one.phase, one.millis]));
  bar.setAttribute("aria-hidden", "true"); // the text has it
  return element("span", { class: "phased" }, bar, element("small", {}, text));
}

// -- Runs now --------------------------------------------------------------------------------------

async function refreshRuns() {
  if (state.look?.status?.kind === "handlers" && !document.hidden) {
    try {
      state.runs = (await ask("runs")).runs;
      state.noRuns = "No handler runs, and no message waits for a retry.";
    } catch {
      state.runs = [];
      state.noRuns = "The source does not answer.";
    }
    showRuns();
  }
  setTimeout(refreshRuns, 1000);
}

function showRuns() {
  table("runs", [
    ["key", "Key", (run) => keyOf(run.key), (run) => keyOf(run.key), "text"],
    ["range", "Range", (run) => run.range, (run) => String(run.range), "number"],
    ["message", "Message", (run) => run.messageId, (run) => `${run.messageId} of ${nameOf(run)}`, "text"],
    ["attempt", "Attempt", (run) => run.attempts, (run) => String(run.attempts + 1), "number"],
    ["elapsed", "Runs for", (run) => run.runningSeconds, (run) => durationOf(run.runningSeconds), "number"],
    ["retry", "Next retry", (run) => run.retryInSeconds, (run) => durationOf(run.retryInSeconds), "number"],
    ["note", "Note", (run) => run.note ?? "", (run) => (!run.note ? "" : `${run.note} (${durationOf(run.noteSecondsAgo)} ago)`), "text"],
    ["error", "Last failure", (run) => run.error, (run) => run.error, "text"],
    ["stack", "Stack", (run) => run.runningSeconds, (run) => (run.state === "running"
      ? element("button", { type: "button", "data-of": `stack ${run.messageId} ${nameOf(run)}`, onclick: () => openStack(run) }, "show")
      : null), ""],
  ], state.runs, 200, state.noRuns);
}

async function openStack(run) {
  await noting("runs-note", async () => {
    const { topic, partition, messageId: id } = run;
    const found = await ask("stack", { topic, partition, id });
    byId("stack-title").textContent = `Message ${id} of ${nameOf(run)}, key ${keyOf(found.key)}`;
    byId("stack-facts").textContent = `The handler runs for ${durationOf(found.runningSeconds)}. The newest call is last.`;
    byId("calls").textContent = found.stack.join("\n") || "The handler is beginning or returning.";
    openDialog(byId("stack"));
    return "";
  });
}

// -- Dead letters ----------------------------------------------------------------------------------

function wanted() {
  const fields = {};
  for (const [name, value] of new FormData(byId("filter"))) {
    if (name === "rejected") fields.rejected = true;
    else if (value !== "") fields[name] = name.endsWith("_s") ? Number(value) : value;
  }
  return fields;
}

async function listDead(from = null) {
  await noting("dead-note", async () => {
    state.dead = await ask("dead_letters", { ...wanted(), limit: 100, ...(from ? { from } : {}) });
    showDead();
    return `${numberOf(state.dead.deadLetters.length)} of ${numberOf(state.dead.examined)} examined dead letters match`;
  });
}

function showDead() {
  const rows = state.dead?.deadLetters ?? [];
  table("dead", [
    ["kind", "Kind", (one) => one.kind, (one) => one.kind, ""],
    ["key", "Key", (one) => one.key, (one) => keyOf(one.key), "text"],
    ["message", "Message", (one) => one.messageId, (one) => `${one.messageId} of ${nameOf(one)}`, "text"],
    ["reason", "Error", (one) => one.reason, (one) => one.reason, "text"],
    ["attempts", "Attempts", (one) => one.attempts, (one) => String(one.attempts), "number"],
    ["age", "Age", (one) => one.ageSeconds, (one) => durationOf(one.ageSeconds), "number"],
    ["value", "Value", (one) => one.bytes, (one) => element("button", { type: "button", "data-of": `value ${one.messageId} ${nameOf(one)}`, onclick: () => openLetter(one) },
      one.bytes === null ? "show" : `${numberOf(one.bytes)} bytes`), ""],
    ["acts", "For its key", (one) => one.key, (one) => actsOf(one, one.kind !== "parked"), ""],
  ], rows, 100, state.dead ? "No dead letter matches." : "Show lists the dead letters that match.");
  byId("next-dead").hidden = !state.dead?.next;
}

// Those that have been parked longest; the list of dead letters has all.
function showParked(status) {
  byId("parked-keys").hidden = !status.parked.length;
  table("parked", [
    ["key", "Parked key", (one) => one.key, (one) => one.key, "text"],
    ["letters", "Dead letters", (one) => one.deadLetters, (one) => numberOf(one.deadLetters), "number"],
    ["acts", "For the key", (one) => one.key, (one) => actsOf(one, false), ""],
  ], status.parked, ROWS, "No key is parked.");
}

// A message without a key, and one that parks no key, has nothing to replay.
function actsOf(one, rejected) {
  if (one.key === null) return "–";
  const fields = { key: one.key, ...(rejected ? { rejected } : {}) };
  const button = (command, verb) => element("button", {
    type: "button", "aria-label": `${verb} … key ${one.key}`, "data-of": `${verb} ${one.messageId ?? ""} ${one.key}`,
    onclick: () => changeDead(command, verb, fields),
  }, `${verb} …`);
  return element("span", { class: "acts" }, rejected ? null : button("unpark", "Replay"), button("discard", "Discard"));
}

async function openLetter(one) {
  await noting("dead-note", async () => {
    const { topic, partition, messageId: id } = one;
    state.letter = { ...(await ask("dead_letter", { topic, partition, id })), asked: { topic, partition, id } };
    byId("letter-title").textContent = `Message ${id} of ${nameOf(one)}, key ${keyOf(one.key)}`;
    byId("letter-facts").textContent = `${one.kind}: ${one.reason}`;
    await showValue();
    openDialog(byId("letter"));
    return "";
  });
}

async function showValue() {
  const letter = state.letter;
  const { value } = letter;
  if (byId("form").value === "schema") {
    byId("value").textContent = "Decoding\u2026";
    const text = await decodedOf(letter);
    if (letter === state.letter && byId("form").value === "schema") byId("value").textContent = text;
    return;
  }
  const bytes = value === null ? null : Uint8Array.from(atob(value), (one) => one.charCodeAt(0));
  let text = bytes === null ? "(no value)" : new TextDecoder().decode(bytes);
  if (bytes !== null && byId("form").value === "hex") {
    text = [...bytes.slice(0, 65536)].map((one) => one.toString(16).padStart(2, "0")).join(" ");
  } else if (bytes !== null && byId("form").value === "JSON") {
    try { text = JSON.stringify(JSON.parse(text), null, 2); } catch { text = `(no JSON)\n${text}`; }
  }
  byId("value").textContent = text;
}

// The source asks the cluster for the schema only when this form is chosen.
async function decodedOf(letter) {
  try {
    letter.decoded ??= (await ask("dead_letter", { ...letter.asked, schema: true })).decoded;
  } catch (error) {
    return `(${error.message})`;
  }
  const { type, version, text, problem } = letter.decoded;
  const parts = text === null ? [] : [`${type} schema, version ${version}:`, text];
  return [...parts, ...(problem === null ? [] : [`(${problem})`])].join("\n");
}

byId("form").addEventListener("change", showValue);
byId("filter").addEventListener("submit", (event) => { event.preventDefault(); listDead(); });
byId("next-dead").addEventListener("click", () => listDead(state.dead.next));
byId("replay").addEventListener("click", () => changeDead("unpark", "Replay", wanted()));
byId("discard").addEventListener("click", () => changeDead("discard", "Discard", wanted()));

async function changeDead(command, verb, conditions) {
  const source = state.look?.chosen; // the look may choose another one while the dialog is open
  const fields = Object.keys(conditions).length ? conditions : { all: true };
  await noting("dead-note", async () => {
    const plan = await ask(command, { ...fields, dry_run: true }, source);
    // A plan of dead letters that park no key counts no keys.
    const of = (counts) => `${numberOf(counts.deadLetters)} dead letters` +
      (counts.keys ? ` of ${numberOf(counts.keys)} keys.` : fields.key === undefined ? "." : ` of key ${fields.key}.`);
    const text = `${verb} ${of(plan)}` +
      (command === "discard" ? " This cannot be undone." : "");
    const keys = plan.first.map((one) => `${keyOf(one.key)}: ${numberOf(one.deadLetters)}`);
    if (!plan.deadLetters) return "No dead letter matches.";
    if (!(await confirmed(`${verb} dead letters`, text, verb, keys))) return "Nothing was changed.";
    const done = await ask(command, fields, source);
    if (state.dead) await listDead();
    return `${verb}: ${of(done)}`;
  });
}

// -- Pause and resume ------------------------------------------------------------------------------

byId("pause").addEventListener("click", () => noting("receiving-note", async () => {
  const source = state.look?.chosen;
  const text = "The source receives nothing until it is resumed or restarted. Its consumers stay connected. " +
    "Messages that were received are still handled and acknowledged.";
  if (!(await confirmed("Pause", text, "Pause"))) return "Nothing was changed.";
  await ask("pause", {}, source);
  return "The source is paused.";
}));
byId("resume").addEventListener("click", () => noting("receiving-note", async () => {
  const source = state.look?.chosen;
  if (!(await confirmed("Resume", "The source receives again at once.", "Resume"))) return "Nothing was changed.";
  await ask("resume", {}, source);
  return "The source receives again.";
}));

// -- Rescale ---------------------------------------------------------------------------------------

byId("rescale").addEventListener("submit", (event) => {
  event.preventDefault();
  const ranges = Number(new FormData(byId("rescale")).get("ranges"));
  noting("moves-note", async () => {
    const source = state.look?.chosen;
    const plan = await ask("rescale", { ranges, dry_run: true }, source);
    const text = `From ${plan.before} to ${plan.after} ranges: ${(plan.movedFraction * 100).toFixed(1)} % of the ` +
      "ring moves. Handlers of keys that move finish first; other keys continue.";
    if (!(await confirmed("Rescale", text, "Rescale"))) return "Nothing was changed.";
    return reportOf(await ask("rescale", { ranges }, source));
  });
});
byId("balance").addEventListener("click", () => noting("moves-note", async () => {
  const source = state.look?.chosen;
  const text = "Keep the number of ranges, and give all ranges equal loads, as measured since the start. The moves depend on " +
    `the load at that moment, so they cannot be shown before. ${spreadOf(state.look.status.ranges)}`;
  if (!(await confirmed("Balance", text, "Balance"))) return "Nothing was changed.";
  return reportOf(await ask("rescale", { balance: true }, source));
}));

function spreadOf(ranges) {
  const handled = ranges.map((range) => range.handled);
  const sum = handled.reduce((total, one) => total + (one ?? 0), 0);
  if (!sum || handled.includes(null)) return "";
  return `Since the last rescale, a range has handled ${numberOf(Math.min(...handled))} to ` +
    `${numberOf(Math.max(...handled))} messages, ${numberOf(sum / handled.length)} on average.`;
}

const reportOf = (report) =>
  `${report.ranges_before} to ${report.ranges_after} ranges in ${durationOf(report.duration_ms / 1000)}: ` +
  `${(report.moved_fraction * 100).toFixed(1)} % of the ring moved.` + (report.balance
    ? ` The load of the busiest range was ${report.balance.max_over_mean_before.toFixed(2)} times the mean, ` +
      `and is ${report.balance.max_over_mean_after.toFixed(2)} times.` : "");

// -- Confirmations ---------------------------------------------------------------------------------

function confirmed(title, text, verb, keys = []) {
  byId("plan-title").textContent = title;
  byId("plan-text").textContent = text;
  byId("plan-keys").replaceChildren(...keys.slice(0, 20).map((one) => element("li", {}, one)));
  byId("yes").textContent = verb;
  const dialog = byId("plan");
  dialog.returnValue = "no"; // also by Escape
  openDialog(dialog);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

// The browser returns the focus to the element that had it, unless its table was drawn again.
function openDialog(dialog) {
  const from = document.activeElement;
  dialog.addEventListener("close", () => {
    if (!from.isConnected) elementOf(document, from.dataset.of)?.focus();
  }, { once: true });
  dialog.showModal();
}

async function noting(id, work) {
  byId(id).textContent = "…";
  try { byId(id).textContent = await work(); } catch (error) { byId(id).textContent = error.message; }
}

showDead();
token();
listen();
refreshRuns();
