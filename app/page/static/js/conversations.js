// The list of conversations, and what can be done to one as a whole.
import { api } from "./api.js";
import { feed, unlocked } from "./server.js";
import { conversations, current, fresh, moreConversations, Transcript, transcript, transcripts } from "./state.js";
import { text } from "./strings.js";

const listed = ({ id, updated_at, created_at, metadata, active_response }) => ({
  id,
  title: metadata.title || text.untitled,
  updatedAt: (updated_at ?? created_at) * 1000,
  activeResponse: active_response ?? null,
});

export async function loadConversations() {
  try {
    const page = await unlocked(() => api.conversations());
    conversations.value = page.data.map(listed);
    moreConversations.value = page.has_more;
  } catch {
    // The list stays as it was; the state of the server and of the link is shown elsewhere.
  }
}

export async function loadMoreConversations() {
  const page = await unlocked(() => api.conversations(conversations.peek().at(-1)?.id));
  const seen = new Set(conversations.peek().map(({ id }) => id));
  conversations.value = [...conversations.peek(), ...page.data.map(listed).filter(({ id }) => !seen.has(id))];
  moreConversations.value = page.has_more;
}

export function newChat() {
  fresh.value = new Transcript("ready");
  current.value = null;
  history.pushState(null, "", "#");
}

/** Have the server begin a conversation for a transcript that has none yet. Returns its id. */
export async function begin(shown, title) {
  const { id } = await unlocked(() => api.createConversation(title));
  transcripts.set(id, shown);
  touch(id, { title });
  // Someone may have opened another conversation while this one was made.
  if (transcript.peek() === shown) {
    current.value = id;
    history.replaceState(null, "", `#${encodeURIComponent(id)}`);
  }
  if (fresh.peek() === shown) fresh.value = new Transcript("ready");
  return id;
}

/** Something happened in a conversation: it comes first in the list. */
export function touch(id, change) {
  const old = conversations.peek().find((one) => one.id === id) ?? { id, title: text.untitled, activeResponse: null };
  const others = conversations.peek().filter((one) => one.id !== id);
  conversations.value = [{ ...old, updatedAt: Date.now(), ...change }, ...others];
}

export async function rename(id, title) {
  const trimmed = title.trim();
  if (!trimmed) return;
  // Metadata is replaced as a whole; what others put there stays.
  const { metadata } = await unlocked(() => api.conversation(id));
  await unlocked(() => api.describeConversation(id, { ...metadata, title: trimmed }));
  conversations.value = conversations.peek().map((one) => (one.id === id ? { ...one, title: trimmed } : one));
}

export async function remove(id) {
  await unlocked(() => api.deleteConversation(id));
  const answer = transcripts.get(id)?.running.peek();
  if (answer) feed.drop(answer);
  transcripts.delete(id);
  conversations.value = conversations.peek().filter((one) => one.id !== id);
  if (current.peek() === id) newChat();
}
