// The HTTP side: conversations, models, readiness, and the key.

/** A request that was refused or did not arrive. `status` is 0 when there was no answer at all. */
export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// Relative to the page, so that it works below any path of a reverse proxy too.
const address = (path) => new URL(path, document.baseURI);

export function socketAddress() {
  const url = address("v1/responses");
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  url.hash = "";
  return url.href;
}

async function call(method, path, body) {
  let response;
  try {
    response = await fetch(address(path), {
      method,
      headers: body === undefined ? {} : { "Content-Type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
    });
  } catch (error) {
    throw new ApiError(String(error.message ?? error), 0);
  }
  const answer = await response.json().catch(() => null);
  if (!response.ok) {
    const reason = answer?.error ?? {};
    throw new ApiError(reason.message ?? response.statusText, response.status, reason.code);
  }
  return answer;
}

const id = encodeURIComponent;

export const api = {
  models: () => call("GET", "v1/models"),
  login: (key) => call("POST", "login", { key }),

  conversations: (after) => call("GET", `v1/conversations?limit=50${after ? `&after=${id(after)}` : ""}`),
  conversation: (name) => call("GET", `v1/conversations/${id(name)}`),
  createConversation: (title) => call("POST", "v1/conversations", { metadata: { title } }),
  describeConversation: (name, metadata) => call("POST", `v1/conversations/${id(name)}`, { metadata }),
  deleteConversation: (name) => call("DELETE", `v1/conversations/${id(name)}`),

  async items(name) {
    const all = [];
    for (let after = ""; ; after = `&after=${id(all.at(-1).id)}`) {
      const page = await call("GET", `v1/conversations/${id(name)}/items?order=asc&limit=100${after}`);
      all.push(...page.data);
      if (!page.has_more || page.data.length === 0) return all;
    }
  },

  /** What `/readyz` says ({status: "ready"}, or why not and how far it is), or {status: "unreachable"}. */
  async readiness() {
    try {
      const response = await fetch(address("readyz"));
      const told = await response.json().catch(() => ({}));
      return response.ok ? { status: "ready" } : { status: "loading", ...told };
    } catch {
      return { status: "unreachable" };
    }
  },
};
