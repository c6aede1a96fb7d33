import { useEffect, useRef, useState } from "preact/hooks";
import { sendRequest, getJson } from "./api";
import { useAction } from "./action";
import { modelPath } from "./model-properties";
import { MissingScope, useScope } from "./session";
import type { Model, ModelResidency as Residency } from "./types";

const POLL_MS = 1000;
const POLLS = 600; // as long as a gateway remembers a load that no worker could begin
const STALE_POLLS = 3; // a failure of an earlier load is reported until the worker has begun this one

type Action = "load" | "unload";

/** One sentence for each lane. */
function summary(reply: Residency): string {
  return reply.lanes.map((lane) => `${lane.model} is ${lane.state} in ${lane.lane}`).join("; ") || "no worker has it loaded";
}

/** Has a model loaded before its first request, or unloaded, and shows its state until that is done. */
export function ModelResidency({ model: { id: model, loaded, state } }: { model: Model }) {
  const { isBusy, notice, setNotice, refusal, runAction } = useAction();
  const mayChange = useScope("admin");
  const [last, setLast] = useState<Action>(); // the list of models is some seconds older
  const isThere = last ? last === "load" : loaded || state === "loading";
  const ended = useRef(false);
  const own = modelPath(model);
  useEffect(() => {
    ended.current = false;
    return () => void (ended.current = true);
  }, [model]);

  /** Poll until the model is loaded, or unloaded, or its load failed. */
  async function settled(action: Action): Promise<string> {
    let began = false;
    for (let polls = 0; polls < POLLS && !ended.current; polls++) {
      const now = await getJson<Model>(own);
      began ||= now.state === "loading";
      if (action === "load" && now.loaded) return `loaded by ${(now.workers ?? []).join(", ")}`;
      if (action === "unload" && now.state === "available") return "unloaded; the next request loads it again";
      if (action === "load" && now.state === "failed" && (began || polls >= STALE_POLLS)) return `not loaded: ${now.last_error?.message ?? "no reason was given"}`;
      setNotice(now.state);
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
    return "not done yet";
  }
  const send = (action: Action) =>
    runAction(async () => {
      const outcome = await sendRequest<Residency>({ method: "POST", path: `${own}/${action}` });
      setNotice(summary(outcome));
      const words = outcome.state === "loaded" || outcome.state === "available" ? summary(outcome) : await settled(action);
      setLast(action);
      return words;
    });

  return (
    <div class="residency">
      <MissingScope scope="admin" subject="To load or unload it by hand takes" />
      {mayChange && (
        <p>
          <button type="button" class="load" disabled={isBusy} onClick={() => send("load")}>Load</button>{" "}
          <button type="button" class="unload" disabled={isBusy || !isThere} onClick={() => send("unload")}>Unload</button>
        </p>
      )}
      <p role="status">{notice}</p>
      {refusal && <p class="bad" role="alert">{refusal}</p>}
    </div>
  );
}
