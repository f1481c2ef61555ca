// What this page asks its server: readiness, models, and answers as they stream. Addresses are relative, so a proxy may put a prefix in front.

const base = new URL(".", document.baseURI);

/** An answer that is no success. `status` 0: no answer at all. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}, key = "") {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  try {
    return await fetch(new URL(path, base), { ...options, headers, credentials: "same-origin", cache: "no-store" });
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new ApiError(0, "The server does not answer.");
  }
}

async function errorOf(response) {
  let message = `The server answers ${response.status}.`;
  try {
    const { error } = await response.json();
    if (error?.message) message = error.param ? `${error.param}: ${error.message}` : error.message;
  } catch {
    // A proxy's page: its status has to do.
  }
  return new ApiError(response.status, message);
}

/** {ready, phase, fraction, message}: phase and fraction while a model loads. */
export async function readiness() {
  let response;
  try {
    response = await ask("ready");
  } catch (fault) {
    return { ready: false, message: fault.message };
  }
  if (response.ok) return { ready: true };
  try {
    const { status, phase, fraction, error } = await response.json();
    return { ready: false, loading: status === "loading", phase, fraction, message: error?.message ?? "The server is not ready." };
  } catch {
    return { ready: false, message: `The server answers ${response.status}.` };
  }
}

export async function listModels(key) {
  const response = await ask("v1/models", {}, key);
  if (!response.ok) throw await errorOf(response);
  return (await response.json()).data;
}

/** The data of server-sent events, as they come. */
async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line === "" && data.length > 0) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The chunks of one streamed chat completion. Aborting `signal` ends it, here and on the server. */
export async function* streamChat(request, key, signal) {
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } });
  const response = await ask("v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body, signal }, key);
  if (!response.ok) throw await errorOf(response);
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(0, "The connection broke before the answer was complete.");
}
