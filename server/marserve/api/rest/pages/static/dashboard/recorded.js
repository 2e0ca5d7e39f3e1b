// What the list of requests and the page of one say alike. Pure.

// In the order and the words of the server; `marserve explain --cause` has the same.
export const CAUSES = {
  queue: "it waited for a worker that ran other requests",
  full_batches: "full batches left before it",
  slow_mate: "another request of its batch is as likely the reason",
  handler: "the work on it took that long, most often the author's code",
  cold_worker: "a worker was started for it, or it was in a worker's first batch",
  eviction: "its model had been put to sleep for another one",
  rollback: "the version that had accepted it was taken back",
  neighbour: "other processes had the processor",
  garbage_collection: "Python collected garbage",
  printing: "the worker waited while it printed",
  loop_stalled: "the server's event loop stood still, or was busy for milliseconds",
  large_body: "reading, passing on and decoding a large body",
  slow_client: "the client sent its request, or took its answer, slowly",
};
export const toneOf = ({ status, error }) => (status >= 500 || (error && status < 400) ? "bad" : status >= 400 ? "fair" : "good");

export const timeOf = (text) => {
  const at = new Date(text);
  if (Number.isNaN(at.getTime())) return text;
  const isToday = at.toDateString() === new Date().toDateString();
  return `${isToday ? "" : `${at.toLocaleDateString("en-CA")} `}${at.toLocaleTimeString("en", { hour12: false })}`;
};
