// The server's state, the key it may want, and the link to it with the answers that come over it.
import { api, socketAddress } from "./api.js";
import { Feed } from "./feed.js";
import { Link } from "./link.js";
import { announcement, delay, model, server } from "./state.js";
import { text } from "./strings.js";

export const link = new Link(socketAddress(), { onLost: look });
export const feed = new Feed(link);

const between = 1000; // ms from one look at a server that is not ready to the next
let looking = null;

/** Find out what the server is up to, again and again until it can be used or wants a key. */
export function look() {
  looking ??= lookUntilKnown().finally(() => {
    looking = null;
  });
  return looking;
}

async function lookUntilKnown() {
  const before = server.peek();
  let state = await probe();
  const waited = state === "waiting" || state === "unreachable";
  while (state === "waiting" || state === "unreachable") {
    if (state === "waiting" && server.peek() !== state) announcement.value = text.said.loading;
    server.value = state;
    await new Promise((resolve) => setTimeout(resolve, between));
    state = await probe();
  }
  server.value = state;
  if (state === "locked") link.close();
  else if (before === "checking" || before === "locked") link.open();
  // Otherwise the link is trying already; its wait may be long by now.
  else if (waited) link.retry();
}

async function probe() {
  const told = await api.readiness();
  delay.value = told;
  if (told.status === "unreachable") return "unreachable";
  if (told.status !== "ready") return "waiting";
  try {
    const { data } = await api.models();
    model.value = data[0]?.id ?? null;
    return "ready";
  } catch (error) {
    return error.status === 401 ? "locked" : "unreachable";
  }
}

/** Give the key. False when the server does not know it. */
export async function login(key) {
  try {
    await api.login(key);
  } catch (error) {
    if (error.status === 401) return false;
    throw error;
  }
  await look();
  return true;
}

/** Run an action; a 401 on the way locks the page too. Errors are the caller's. */
export async function unlocked(action) {
  try {
    return await action();
  } catch (error) {
    if (error.status === 401) {
      server.value = "locked";
      link.close();
    }
    throw error;
  }
}
