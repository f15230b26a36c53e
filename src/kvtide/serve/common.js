// What all parts of the page share: sizes in words, texts, and changes with the token.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export const $ = (id) => document.getElementById(id);

export function size(bytes) {
  let value = bytes, unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
  const digits = Number.isInteger(value) || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${UNITS[unit]}`;
}

// A size that reads back as the very same bytes.
export function exact(bytes) {
  let value = bytes, unit = 0;
  while (value && value % 1024 === 0 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
  return `${value}${UNITS[unit]}`;
}

// Texts are set only where they differ, so that a screen reader's place and a selection stay.
export function text(element, wanted) {
  if (element.textContent !== wanted) element.textContent = wanted;
}

export function pathOf(name) {
  return `/api/v1/instances/${encodeURIComponent(name)}`;
}

// Returns what went wrong, if anything did.
export async function change(path, method, body, done) {
  let failed = null;
  try {
    const response = await fetch(path, {
      method, body: JSON.stringify(body),
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${$("token").value}` },
    });
    const answer = await response.json();
    if (!response.ok) failed = answer.error;
    else notice(done(answer), false);
  } catch {
    failed = "The server does not answer.";
  }
  if (failed) notice(failed, true);
  return failed;
}

export function notice(message, bad) {
  $("notice").className = bad ? "bad" : "";
  $("notice").textContent = message;
}
