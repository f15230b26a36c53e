// The terms of an instance in words, and the dialog that changes them.

import { $, change, exact, pathOf, size, text } from "/common.js";

export function termsText(instance) {
  const unbacked = instance.min_bytes - instance.backed_min_bytes;
  const said = [];
  if (instance.min_bytes) said.push(`min ${size(instance.min_bytes)}` + (unbacked > 0 ? ` (${size(unbacked)} unbacked)` : ""));
  if (instance.priority) said.push(`priority ${instance.priority}`);
  if (instance.headroom_bytes) said.push(`headroom ${size(instance.headroom_bytes)}`);
  return said.join(", ");
}

const TERMS = ["limit", "min", "priority", "headroom"];
let edited = null; // what the dialog shows: device, name, revision, and the texts as they were

export function editTerms(device, instance) {
  const texts = {
    limit: instance.limit_bytes === null ? "none" : exact(instance.limit_bytes),
    min: exact(instance.min_bytes), priority: String(instance.priority), headroom: exact(instance.headroom_bytes),
  };
  edited = { device, name: instance.name, revision: instance.limit_revision, texts };
  text($("terms-title"), `Terms of ${instance.name}`);
  for (const term of TERMS) $(`terms-${term}`).value = texts[term];
  text($("terms-notice"), "");
  $("terms").showModal();
}

// Only what was changed is sent, against the revision that was shown when the dialog was opened.
async function setTerms() {
  const body = { device: edited.device, revision: edited.revision };
  for (const term of TERMS) {
    const wanted = $(`terms-${term}`).value.trim();
    if (wanted === edited.texts[term]) continue;
    if (term === "priority") body.priority = Number(wanted);
    else if (term === "limit") body.limit = wanted === "none" || wanted === "" ? null : wanted;
    else body[term] = wanted || "0";
  }
  const name = edited.name;
  const failed = await change(pathOf(name), "PATCH", body, () => `The terms of ${name} are set.`);
  if (failed) text($("terms-notice"), failed);
  else $("terms").close();
}

$("terms").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  setTerms();
});
$("terms-leave").addEventListener("click", () => $("terms").close());
