// The store over HTTP. The token goes into a header, and nowhere else; it lives as long as this tab does.

const KEY = "quire-token";
let token = sessionStorage.getItem(KEY) || "";

export const hasToken = () => token !== "";

export class Failure extends Error {
  constructor(status, result) {
    super(result.message || `the server returned status ${status}`);
    this.status = status;
    this.hint = result.hint || "";
  }
}

export function headers(extra) {
  return token ? { Authorization: `Bearer ${token}`, ...extra } : { ...extra };
}

async function ask(path, options) {
  const answer = await fetch(path, { cache: "no-store", credentials: "omit", ...options });
  const result = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Failure(answer.status, result);
  return result;
}

export const get = (path) => ask(path, { headers: headers() });

export const post = (path, body) => ask(path, {
  method: "POST",
  headers: headers({ "Content-Type": "application/json" }),
  body: JSON.stringify(body || {}),
});

export async function useToken(given) {
  const before = token;
  token = given;
  try {
    const me = await get("/api/me");
    if (given) sessionStorage.setItem(KEY, given);
    else sessionStorage.removeItem(KEY);
    return me;
  } catch (failure) {
    token = before;
    throw failure;
  }
}

// Server-Sent Events by hand: the browser's own reader cannot send the header.
export async function follow(onEvent, signal) {
  const answer = await fetch("/api/events", { headers: headers(), cache: "no-store", credentials: "omit", signal });
  if (!answer.ok) throw new Failure(answer.status, await answer.json().catch(() => ({})));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = Object.fromEntries(block.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
      onEvent(lines.event, JSON.parse(lines.data));
    }
  }
}
