import { useState } from "preact/hooks";
import { ask } from "./api";
import { useAttempts } from "./attempts";
import { type Program, quoted } from "./code";
import { Copies } from "./copies";
import { complaint, parsed } from "./json-map";
import { href } from "./routes";
import type { Written } from "./types";

const EXAMPLE = "BAAI/bge-small-en-v1.5";
const ENTRY = '{"id": "my/model", "weights": {"path": "/models/my-model"}, "family": "text-encoder", "outputs": {"dense": 384}, "max_tokens": 512}';

const program = (name: string, text: string): Program => ({ name, shown: `${text}\n`, whole: () => `${text}\n` });

/** How a model is added: by a command, which reads its files, or by its entry. */
export function ModelAdd() {
  const [name, setName] = useState("");
  const [entry, setEntry] = useState("");
  const { isBusy, said, refusal, attempt } = useAttempts("a key with the scope config adds models");
  const wanted = quoted(name.trim() || EXAMPLE);
  const wrong = complaint(entry);
  const write = () =>
    attempt(async () => {
      const { revision, warnings } = await ask<Written>({ method: "POST", path: "/console/configs", body: parsed(entry) });
      return [`It is at revision ${revision}.`, ...warnings].join(" ");
    });
  const id = parsed(wrong ? "" : entry)?.["id"];
  return (
    <details id="add-model">
      <summary>Add a model</summary>
      <div class="panel">
        <label>
          Id of the Hugging Face Hub, or a folder
          <input id="add-name" value={name} placeholder={EXAMPLE} spellcheck={false} autocomplete="off" onInput={(event) => setName(event.currentTarget.value)} />
        </label>
        <p>Run this on the machine of the server. It reads the model's files, pins their commit, and adds the model to this list within seconds.</p>
        <Copies title="" programs={[program("sie pull", `sie pull ${wanted}`)]} open />
        <details>
          <summary>By its entry, as JSON</summary>
          <label>
            Entry
            <textarea id="add-entry" class="entry" rows={5} spellcheck={false} placeholder={ENTRY} value={entry} aria-invalid={Boolean(wrong)} onInput={(event) => setEntry(event.currentTarget.value)} />
          </label>
          {wrong && <p class="bad" role="alert">{wrong}</p>}
          <button type="button" id="add-write" disabled={isBusy || Boolean(wrong) || !entry.trim()} onClick={write}>Add</button>
          <p role="status">{isBusy ? "working" : said}{said && typeof id === "string" && <> <a href={href("models", [id])}>{id}</a></>}</p>
          {refusal && <p class="bad" role="alert">{refusal}</p>}
        </details>
      </div>
    </details>
  );
}
