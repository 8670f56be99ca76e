// Every text a person reads. One language now; a second one is a second table of this shape.

const number = new Intl.NumberFormat("en");
const decimal = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const seconds = new Intl.NumberFormat("en", { maximumFractionDigits: 2, minimumFractionDigits: 2 });
const percent = new Intl.NumberFormat("en", { style: "percent" });
const time = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat("en", { day: "numeric", month: "short" });

export const text = {
  name: "Pageturner",
  contents: "Contents",
  openContents: "Open the list of conversations",
  closeContents: "Close the list of conversations",
  newChat: "New chat",
  noConversations: "No conversations yet.",
  moreConversations: "Older ones",
  untitled: "Untitled",
  rename: "Rename",
  renameLabel: "Title of this conversation",
  save: "Save",
  remove: "Delete",
  removeQuestion: (title) => `Delete “${title}”?`,
  removeWarning: "Its turns are gone for good.",
  keep: "Keep it",
  you: "You",
  answer: "Answer",
  transcript: "Conversation",
  emptyHeading: "A fresh page.",
  emptyText: "Ask something. Each later turn is read on from where the last one ended.",
  composerLabel: "Your message",
  composerHint: "Write a message",
  send: "Send",
  stop: "Stop",
  jumpToLatest: "Latest",
  thinking: "Reading…",
  stopped: "Stopped.",
  unfinished: "Unfinished.",
  cutOff: "Ended at the length limit.",
  failed: (message) => `This answer failed. ${message}`,
  failedUnknown: "The server gave no reason.",
  refused: (message) => `Not sent. ${message}`,
  loadFailed: (message) => `This could not be loaded. ${message}`,
  missing: "This conversation no longer exists.",
  retry: "Try again",
  waiting({ status, fraction }) {
    if (status === "failed") return "The server could not load its model. Its log says why.";
    if (status === "draining") return "The server is shutting down.";
    if (status === "engine restarting") return "The model is starting again…";
    return typeof fraction === "number" ? `Loading the model… ${percent.format(fraction)}` : "Loading the model…";
  },
  connecting: "Connecting…",
  reconnecting: "Connection lost. Trying again…",
  unreachable: "The server cannot be reached.",
  keyHeading: "This server asks for a key.",
  keyLabel: "API key",
  keySubmit: "Open",
  keyWrong: "That key is not known here.",
  said: {
    generating: "The answer is being written.",
    complete: "The answer is complete.",
    stopped: "The answer was stopped.",
    failed: "The answer failed.",
    reconnecting: "Connection lost, trying again.",
    reconnected: "Connected again.",
    loading: "The model is loading.",
  },
  usage: {
    read: (count, cached) => `${number.format(count)} tokens read, ${number.format(cached)} from the cache`,
    written: (count) => `${number.format(count)} written`,
    first: (ms) => `first after ${seconds.format(ms / 1000)} s`,
    rate: (perSecond) => `${decimal.format(perSecond)} a second`,
  },
  when(date, now = new Date()) {
    return date.toDateString() === now.toDateString() ? time.format(date) : day.format(date);
  },
};
