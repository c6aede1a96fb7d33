import { useState } from "preact/hooks";
import { sendRequest } from "./api";
import { usePolling } from "./polling";
import { useAction } from "./action";
import { shellCommand, shellQuote } from "./code";
import { CodeSamples } from "./code-samples";
import { jsonFault, parseMap } from "./json-fields";
import { href } from "./routes";
import { MissingScope, useScope } from "./session";
import type { Cluster, Model, WrittenConfig } from "./types";

const EXAMPLE = "BAAI/bge-small-en-v1.5";
const EVERY_MS = 60_000;
const HUB_ID = /^\w[\w.-]*(\/[\w.:-]+)?$/; // also of a profile; all else is a folder
const ENTRY = '{"id": "my/model", "weights": {"path": "/models/my-model"}, "family": "text-encoder", "outputs": {"dense": 384}, "max_tokens": 512}';

/** Add a model by a command, which reads its files, or by its entry. `initialName` is the name of a model that a search
 * did not find. */
export function ModelAdd({ models, initialName }: { models: Model[]; initialName: string }) {
  const [name, setName] = useState(initialName);
  const [entry, setEntry] = useState("");
  const { isBusy, notice, refusal, runAction } = useAction("To add a model, sign in with a key with the scope config.");
  const { value: cluster } = usePolling<Cluster>("/v1/cluster", EVERY_MS);
  const typed = name.trim();
  const example = shellQuote(typed || EXAMPLE);
  const fault = jsonFault(entry);
  const mayWrite = useScope("config");
  const folderName = HUB_ID.test(typed) ? "" : typed.split("/").filter(Boolean).at(-1);
  const existing = models.find(({ id }) => id === typed || id === folderName);
  const write = () =>
    runAction(async () => {
      const { revision, warnings } = await sendRequest<WrittenConfig>({ method: "POST", path: "/console/configs", body: parseMap(entry) });
      return [`The entry is written as revision ${revision}.`, ...warnings].join(" ");
    });
  const id = parseMap(fault ? "" : entry)?.["id"];
  return (
    <details id="add-model" open={Boolean(initialName)}>
      <summary>Add a model</summary>
      <div class="panel">
        <label>
          Id of the Hugging Face Hub, or a folder
          <input id="add-name" value={name} placeholder={EXAMPLE} spellcheck={false} autocomplete="off" onInput={(event) => setName(event.currentTarget.value)} />
        </label>
        <p>Then run this in a terminal on the machine of the server. It downloads the files of an id and pins their commit, or takes the files of a folder, and adds the model to this list within ten seconds. Its name here is the id, or the name of the folder.</p>
        <CodeSamples title="" programs={[shellCommand(`sie pull ${example}${cluster?.data_dir ? ` --data-dir ${shellQuote(cluster.data_dir)}` : ""}`, "sie pull")]} open />
        <p role="status">{existing && <>The catalogue has this model: <a href={href("models", [existing.id])}>{existing.id}</a></>}</p>
        <details>
          <summary>By its entry, as JSON</summary>
          <label>
            Entry
            <textarea id="add-entry" class="entry" rows={5} spellcheck={false} placeholder={ENTRY} value={entry} aria-invalid={Boolean(fault)} onInput={(event) => setEntry(event.currentTarget.value)} />
          </label>
          {fault && <p class="bad" role="alert">{fault}</p>}
          <MissingScope scope="config" subject="This needs" />
          <span class="row">
            <button type="button" id="add-write" disabled={isBusy || Boolean(fault) || !entry.trim() || !mayWrite} onClick={write}>Add</button>
            {mayWrite && !entry.trim() && <span class="dim">The entry is empty.</span>}
          </span>
          <p role="status">{isBusy ? "working" : notice}{notice && typeof id === "string" && <> <a href={href("models", [id])}>{id}</a></>}</p>
          {refusal && <p class="bad" role="alert">{refusal}</p>}
        </details>
      </div>
    </details>
  );
}
