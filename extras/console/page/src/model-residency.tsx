import { useEffect, useRef, useState } from "preact/hooks";
import { sendRequest, getJson } from "./api";
import { useAction } from "./action";
import { modelPath } from "./model-properties";
import { MissingScope, useScope } from "./session";
import type { Model, ModelResidency as Residency } from "./types";

const POLL_MS = 1000;
const MAX_POLLS = 600; // the gateway forgets a load after 600 s if no worker could begin it
const STALE_POLLS = 3; // the state may be the failure of an earlier load until the worker begins this one

type Action = "load" | "unload";

/** Return the state of the model in each lane, as text. */
function summary(reply: Residency): string {
  return reply.lanes.map((lane) => `${lane.model} is ${lane.state} in ${lane.lane}`).join("; ") || "no worker has it loaded";
}

/** The buttons that load or unload a model. Its state is shown until the action has ended. */
export function ModelResidency({ model: { id: model, loaded, state } }: { model: Model }) {
  const { isBusy, notice, setNotice, refusal, runAction } = useAction();
  const mayChange = useScope("admin");
  const [lastAction, setLastAction] = useState<Action>(); // newer than the list of models, which is some seconds old
  const isLoaded = lastAction ? lastAction === "load" : loaded || state === "loading";
  const ended = useRef(false);
  const path = modelPath(model);
  useEffect(() => {
    ended.current = false;
    return () => void (ended.current = true);
  }, [model]);

  /** Poll until the model is loaded or unloaded, or its load has failed. Return the outcome as text. */
  async function waitForEnd(action: Action): Promise<string> {
    let began = false;
    for (let polls = 0; polls < MAX_POLLS && !ended.current; polls++) {
      const current = await getJson<Model>(path);
      began ||= current.state === "loading";
      if (action === "load" && current.loaded) return `loaded by ${(current.workers ?? []).join(", ")}`;
      if (action === "unload" && current.state === "available") return "unloaded; the next request loads it again";
      if (action === "load" && current.state === "failed" && (began || polls >= STALE_POLLS)) return `not loaded: ${current.last_error?.message ?? "no reason was given"}`;
      setNotice(current.state);
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
    return "not done yet";
  }
  const send = (action: Action) =>
    runAction(async () => {
      const reply = await sendRequest<Residency>({ method: "POST", path: `${path}/${action}` });
      setNotice(summary(reply));
      const text = reply.state === "loaded" || reply.state === "available" ? summary(reply) : await waitForEnd(action);
      setLastAction(action);
      return text;
    });

  return (
    <div class="residency">
      <MissingScope scope="admin" subject="To load or unload this model by hand, you need" />
      {mayChange && (
        <p>
          <button type="button" class="load" disabled={isBusy} onClick={() => send("load")}>Load</button>{" "}
          <button type="button" class="unload" disabled={isBusy || !isLoaded} onClick={() => send("unload")}>Unload</button>
        </p>
      )}
      <p role="status">{notice}</p>
      {refusal && <p class="bad" role="alert">{refusal}</p>}
    </div>
  );
}
