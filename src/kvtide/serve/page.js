// The page of `kvtide serve`: draws what the server streams, and sends changes with the token.

import { $, change, exact, pathOf, size, text } from "/common.js";
import { editTerms, termsText } from "/terms.js";

const HISTORY_SECONDS = 900;
const KEPT_EVENTS = 200;

const points = new Map(); // device -> [{time, outside_bytes, mapped_bytes}]
const hues = new Map(); // device and instance -> number
const sections = new Map(); // device -> element
const seen = new WeakMap(); // an instance's row -> what it was last
let stream = null;

function hue(device, instance) {
  const key = `${device}\n${instance}`;
  if (!hues.has(key)) {
    const used = [...hues].filter(([k]) => k.startsWith(`${device}\n`)).map(([, n]) => n);
    let n = 0;
    while (n < 7 && used.includes(n)) n += 1;
    hues.set(key, n);
  }
  return `hue${hues.get(key)}`;
}

function segments(bar, wanted, total) {
  while (bar.children.length > wanted.length) bar.lastChild.remove();
  wanted.forEach(([kind, bytes], i) => {
    let segment = bar.children[i];
    if (!segment) { segment = document.createElement("span"); bar.append(segment); }
    if (segment.className !== kind) segment.className = kind;
    const share = `${Math.min(100, (100 * bytes) / total)}%`;
    const mark = kind === "limit" || kind === "min";
    segment.style.left = mark ? `calc(${share} - 3px)` : "";
    segment.style.width = mark ? "" : share;
  });
}

const USES = ["used", "cached", "idle", "quarantined"];
// What an instance has beside its KV cache; on the host device that does not count.
const BESIDE = ["non_kv", "loading"];

function parts(device, instance) {
  const color = hue(device.device, instance.name);
  const uses = device.backend === "host" ? USES : [...USES, ...BESIDE];
  return uses.map((use) => [`${use} ${color}`, instance[`${use}_bytes`]]).filter(([, n]) => n > 0);
}

function sectionOf(device) {
  let section = sections.get(device.device);
  if (!section) {
    section = $("device").content.cloneNode(true).firstElementChild;
    section.dataset.device = device.device;
    const id = `device-${sections.size}`;
    const title = section.querySelector("h2");
    title.id = id;
    section.setAttribute("aria-labelledby", id);
    const region = section.querySelector(".scroll");
    region.setAttribute("aria-labelledby", id);
    sections.set(device.device, section);
    $("devices").append(section);
  }
  return section;
}

function showDevice(device) {
  const section = sectionOf(device);
  const living = device.instances.filter((i) => i.state !== "dead");
  const name = device.name && device.name !== device.device ? `${device.name} (${device.device})` : device.device;
  text(section.querySelector("h2"), `${name}, ${size(device.total_bytes)}`);
  text(section.querySelector(".sum"),
    `${size(device.charged_bytes)} charged of a budget of ${size(device.budget_bytes)}; ` +
    `${size(device.free_bytes)} could be had now, and ${size(device.lendable_bytes)} more from idle caches; ${size(device.outside_bytes)} is taken by others than KV caches.`);
  const bar = section.querySelector(".device > .bar");
  const stacked = living.flatMap((i) => parts(device, i));
  if (device.outside_bytes > 0) stacked.push(["outside", device.outside_bytes]);
  segments(bar, stacked, device.total_bytes);
  const held = living.map((i) => `${i.name} ${size(i.mapped_bytes)}`).join(", ") || "nobody holds any";
  bar.setAttribute("aria-label", `Memory of ${size(device.total_bytes)}: ${held}, others ${size(device.outside_bytes)}`);
  showLegend(section.querySelector(".legend"), device, living);
  showRows(section.querySelector("tbody"), device, living);
  showHistory(section, device, living);
}

function showLegend(list, device, living) {
  const wanted = [
    ...living.map((i) => [i.name, `plain ${hue(device.device, i.name)}`]),
    ["in use", "swatch used"], ["cached", "swatch cached"], ["mapped and idle", "swatch idle"],
    ...(device.backend === "host" ? [] : [["beside the KV cache", "swatch non_kv"], ["reserved", "swatch loading"]]),
    ["others", "outside"], ["free", "free"],
  ];
  const key = JSON.stringify(wanted);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...wanted.map(([label, kind]) => {
    const item = document.createElement("li"), swatch = document.createElement("i");
    swatch.className = kind;
    item.append(swatch, label);
    return item;
  }));
}

function showRows(body, device, living) {
  const rows = new Map([...body.children].map((row) => [row.dataset.key, row]));
  for (const instance of living) {
    let row = rows.get(instance.key);
    if (!row) { row = newRow(device, instance); body.append(row); }
    rows.delete(instance.key);
    showRow(row, device, instance);
  }
  for (const row of rows.values()) row.remove();
}

function newRow(device, instance) {
  const row = $("instance").content.cloneNode(true).firstElementChild;
  row.dataset.key = instance.key;
  row.dataset.instance = instance.name;
  const input = row.querySelector("input");
  input.setAttribute("aria-label", `Limit of ${instance.name}: a size such as 12GiB, or none`);
  row.querySelector("button").setAttribute("aria-label", `Set the limit of ${instance.name}`);
  row.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    setLimit(device.device, row);
  });
  const trim = row.querySelector(".trim");
  trim.setAttribute("aria-label", `Trim ${instance.name}: have it give back its idle memory`);
  trim.addEventListener("click", () => change(
    `${pathOf(instance.name)}/trim`, "POST", { device: device.device },
    ([done]) => `${instance.name} gave back ${size(Math.max(0, done.before_bytes - done.after_bytes))}.`));
  const terms = row.querySelector(".terms");
  terms.setAttribute("aria-label", `Edit the terms of ${instance.name}: limit, min, priority and headroom`);
  terms.setAttribute("aria-haspopup", "dialog");
  terms.addEventListener("click", () => editTerms(device.device, seen.get(row)));
  return row;
}

function showRow(row, device, instance) {
  text(row.querySelector("th"), instance.name);
  const state = row.querySelector(".state");
  text(state, instance.silent ? `${instance.state}, does not answer` : instance.state);
  state.className = `state ${instance.state}`;
  const bar = row.querySelector(".bar"), own = parts(device, instance);
  if (instance.limit_bytes !== null) own.push(["limit", instance.limit_bytes]);
  if (instance.min_bytes > 0) own.push(["min", instance.min_bytes]);
  segments(bar, own, device.total_bytes);
  const limit = instance.limit_bytes === null ? "none" : exact(instance.limit_bytes);
  bar.setAttribute("aria-label",
    `${size(instance.mapped_bytes)} mapped: ${size(instance.used_bytes)} in use, ${size(instance.cached_bytes)} cached, ` +
    `${size(instance.idle_bytes)} idle; limit ${limit}`);
  text(row.querySelector(".is-mapped"), size(instance.mapped_bytes));
  text(row.querySelector(".is-used"), size(instance.used_bytes));
  text(row.querySelector(".is-cached"), size(instance.cached_bytes));
  text(row.querySelector(".is-waiting"), instance.waiting_bytes ? size(instance.waiting_bytes) : "");
  text(row.querySelector(".is-terms"), termsText(instance));
  seen.set(row, instance);
  const input = row.querySelector("input");
  if (row.dataset.revision !== String(instance.limit_revision)) {
    row.dataset.revision = instance.limit_revision;
    input.value = limit;
  }
}

async function setLimit(device, row) {
  const name = row.dataset.instance, wanted = row.querySelector("input").value.trim();
  const body = { limit: wanted === "none" || wanted === "" ? null : wanted, device, revision: Number(row.dataset.revision) };
  await change(pathOf(name), "PATCH", body,
    () => `The limit of ${name} is ${body.limit ?? "none"} now.`);
}

function addPoint(point) {
  const kept = points.get(point.device) ?? [];
  if (!kept.length || point.time > kept[kept.length - 1].time) kept.push(point);
  while (kept.length && kept[0].time < point.time - HISTORY_SECONDS) kept.shift();
  points.set(point.device, kept);
}

function showHistory(section, device) {
  const kept = points.get(device.device) ?? [];
  const svg = section.querySelector("svg");
  if (kept.length < 2) return;
  const end = kept[kept.length - 1].time, begin = kept[0].time;
  const x = (time) => (900 * (time - begin)) / Math.max(1e-9, end - begin);
  const y = (bytes) => 160 - (160 * bytes) / device.total_bytes;
  const names = [...new Set(kept.flatMap((p) => Object.keys(p.mapped_bytes)))].sort();
  const layers = [["outside", (p) => p.outside_bytes], ...names.map((n) => [hue(device.device, n), (p) => p.mapped_bytes[n] ?? 0])];
  const below = kept.map(() => 0);
  layers.forEach(([kind, of], i) => {
    const lower = [...below];
    kept.forEach((p, j) => { below[j] += of(p); });
    const over = kept.map((p, j) => `${x(p.time).toFixed(1)},${y(below[j]).toFixed(1)}`);
    const under = kept.map((p, j) => `${x(p.time).toFixed(1)},${y(lower[j]).toFixed(1)}`).reverse();
    let path = svg.children[i];
    if (!path) { path = document.createElementNS("http://www.w3.org/2000/svg", "path"); svg.append(path); }
    path.setAttribute("class", kind);
    path.setAttribute("d", `M${over.join("L")}L${under.join("L")}Z`);
  });
  while (svg.children.length > layers.length) svg.lastChild.remove();
  const span = end - begin < 90 ? `${Math.round(end - begin)} seconds` : `${Math.round((end - begin) / 60)} minutes`;
  text(section.querySelector("figcaption"), `Memory held over the last ${span}.`);
  svg.setAttribute("aria-label", `Memory held over the last ${span}; now ${size(below[below.length - 1])} of ${size(device.total_bytes)}`);
}

function showEvents(events) {
  const body = $("events").tBodies[0];
  for (const event of events) {
    const row = body.insertRow(0);
    for (const cell of [new Date(event.time * 1000).toLocaleTimeString(), event.device, event.instance, event.text]) {
      row.insertCell().textContent = cell;
    }
  }
  while (body.rows.length > KEPT_EVENTS) body.deleteRow(-1);
}

function show(view) {
  for (const device of view.devices) {
    const mapped = {};
    for (const i of device.instances) if (i.state !== "dead") mapped[i.name] = i.mapped_bytes;
    addPoint({ time: view.time, device: device.device, outside_bytes: device.outside_bytes, mapped_bytes: mapped });
    showDevice(device);
  }
  const here = new Set(view.devices.map((d) => d.device));
  for (const [name, section] of sections) if (!here.has(name)) { section.remove(); sections.delete(name); }
  $("troubles").replaceChildren(...view.troubles.map((t) => {
    const item = document.createElement("li");
    item.textContent = t;
    return item;
  }));
  showEvents(view.events);
  const connection = $("connection");
  text(connection, view.devices.length ? "Live." : "Live. No engine has run under kvtide yet.");
  connection.className = "";
}

function listen() {
  stream = new EventSource("/api/v1/events");
  stream.onopen = () => $("events").tBodies[0].replaceChildren();
  stream.onmessage = (message) => show(JSON.parse(message.data));
  stream.onerror = () => {
    text($("connection"), "Connection lost; trying again.");
    $("connection").className = "lost";
  };
}

async function start() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname);
  }
  $("token").value = sessionStorage.getItem("token") ?? "";
  $("token").addEventListener("change", () => sessionStorage.setItem("token", $("token").value.trim()));
  $("token-form").addEventListener("submit", (event) => event.preventDefault());
  const past = await (await fetch("/api/v1/history")).json();
  past.forEach(addPoint);
  listen();
}

start();
