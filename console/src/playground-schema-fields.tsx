/** The fields that say what an extraction answers: labels, the values of a JSON Schema, or groups of labels. */

import { useState } from "preact/hooks";
import type { Settings } from "./playground-controls";
import type { Model } from "./types";

/** Why a field cannot be sent, or was refused. */
export type Faults = Partial<Record<keyof Settings, string>>;

const MOST_BYTES = 65_536; // of a schema, as the server has it

const DECISIONS = {
  subject: { enum: ["science", "sport", "politics"] },
  is_meeting: { type: "boolean", description: "people met each other" },
};
const DRAWN = {
  people: { type: "array", items: { type: "string" }, description: "names of persons" },
  place: { type: "string" },
  year: { type: "integer", minimum: 1000, maximum: 2100 },
};
const written = (value: unknown): string => JSON.stringify(value, null, 1);
const GROUPS = written({ subject: DECISIONS.subject.enum, mood: ["calm", "angry"] });

/** A schema that the model can answer. */
const sampleOf = (model: Model | undefined): string =>
  written({ type: "object", properties: { ...(model?.extracts.includes("entities") ? DRAWN : {}), ...DECISIONS } });

export const hasOption = (model: Model | undefined, option: string): boolean => Boolean(model?.options.includes(option));

/** What is answered: labels by a model that knows nothing else. */
export const answerOf = ({ answer }: Settings, model: Model | undefined): string =>
  (answer === "schema" && hasOption(model, "output_schema")) || (answer === "groups" && hasOption(model, "label_groups")) ? answer : "labels";

export const schemaOf = ({ schema }: Settings, model: Model | undefined): string => schema ?? sampleOf(model);
export const groupsOf = ({ groups }: Settings): string => groups ?? GROUPS;

/** A field for JSON, with what is wrong with it below. */
export function JsonField({ id, label, value, fault, rows = 2, placeholder = "", onValue }: { id: string; label: string; value: string; fault?: string | undefined; rows?: number; placeholder?: string; onValue: (value: string) => void }) {
  return (
    <>
      <label>
        {label}
        <textarea id={id} class={rows > 2 ? "entry" : ""} rows={rows} spellcheck={false} placeholder={placeholder} value={value} aria-invalid={Boolean(fault)} aria-describedby={fault ? `${id}-fault` : undefined} onInput={(event) => onValue(event.currentTarget.value)} />
      </label>
      {fault && <p class="bad" role="alert" id={`${id}-fault`}>{fault}</p>}
    </>
  );
}

interface Props {
  model: Model | undefined;
  settings: Settings;
  faults: Faults;
  /** Before the ids of the fields. */
  prefix: string;
  set: (name: keyof Settings, value: string | undefined) => void;
}

/** The schema or the groups, where the model answers them. */
export function SchemaFields({ model, settings, faults, prefix, set }: Props) {
  const [unread, setUnread] = useState("");
  const answer = answerOf(settings, model);

  async function open(field: HTMLInputElement) {
    const file = field.files?.[0];
    field.value = ""; // the same file may be opened again after a change
    if (!file) return;
    const isSmall = file.size <= MOST_BYTES;
    setUnread(isSmall ? "" : `${file.name} has ${file.size} bytes: a schema has at most ${MOST_BYTES}.`);
    if (isSmall) set("schema", await file.text());
  }

  if (answer === "groups") return <JsonField id={`${prefix}groups`} label="Groups of labels, as JSON" rows={8} value={groupsOf(settings)} fault={faults.groups} onValue={(value) => set("groups", value)} />;
  if (answer !== "schema") return null;
  return (
    <>
      <JsonField id={`${prefix}schema`} label="JSON Schema of the values" rows={12} value={schemaOf(settings, model)} fault={faults.schema} onValue={(value) => set("schema", value)} />
      <span class="row">
        <label>
          Open a file with a schema
          <input id={`${prefix}schema-file`} type="file" accept=".json,application/json,application/schema+json" onChange={(event) => void open(event.currentTarget)} />
        </label>
        <button type="button" id={`${prefix}schema-sample`} onClick={() => set("schema", undefined)}>Use the sample</button>
      </span>
      {unread && <p class="bad" role="alert">{unread}</p>}
    </>
  );
}
