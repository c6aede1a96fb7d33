/** The fields for the answer of an extraction: the values of a JSON Schema, or groups of labels. */

import { useState } from "preact/hooks";
import type { Settings } from "./playground-controls";
import type { Model } from "./types";

/** The faults of fields: of the page's own checks, or of the server. */
export type Faults = Partial<Record<keyof Settings, string>>;

const MAX_SCHEMA_BYTES = 65_536; // the limit of the server

const CLASS_FIELDS = {
  subject: { enum: ["science", "sport", "politics"] },
  is_meeting: { type: "boolean", description: "people met each other" },
};
const ENTITY_FIELDS = {
  people: { type: "array", items: { type: "string" }, description: "names of persons" },
  place: { type: "string" },
  year: { type: "integer", minimum: 1000, maximum: 2100 },
};
const indented = (value: unknown): string => JSON.stringify(value, null, 1);
const GROUPS = indented({ subject: CLASS_FIELDS.subject.enum, mood: ["calm", "angry"] });

/** Return a sample of a schema that the model can answer. */
const sampleOf = (model: Model | undefined): string =>
  indented({ type: "object", properties: { ...(model?.extracts.includes("entities") ? ENTITY_FIELDS : {}), ...CLASS_FIELDS } });

/** Return true if a model has an option. */
export const hasOption = (model: Model | undefined, option: string): boolean => Boolean(model?.options.includes(option));

/** Return the kind of answer: `schema`, `groups` or `labels`. A model without the chosen kind answers labels. */
export const answerOf = ({ answer }: Settings, model: Model | undefined): string =>
  (answer === "schema" && hasOption(model, "output_schema")) || (answer === "groups" && hasOption(model, "label_groups")) ? answer : "labels";

export const schemaOf = ({ schema }: Settings, model: Model | undefined): string => schema ?? sampleOf(model);
export const groupsOf = ({ groups }: Settings): string => groups ?? GROUPS;

/** A field for JSON, with its fault below. */
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
  /** The prefix of the ids of the fields. */
  prefix: string;
  set: (name: keyof Settings, value: string | undefined) => void;
}

/** The field for the schema or for the groups, if the chosen answer has one. */
export function SchemaFields({ model, settings, faults, prefix, set }: Props) {
  const [fileFault, setFileFault] = useState("");
  const answer = answerOf(settings, model);

  async function open(field: HTMLInputElement) {
    const file = field.files?.[0];
    field.value = ""; // allows the user to open the same file again after a change
    if (!file) return;
    const isSmall = file.size <= MAX_SCHEMA_BYTES;
    setFileFault(isSmall ? "" : `${file.name} has ${file.size} bytes: a schema has at most ${MAX_SCHEMA_BYTES}.`);
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
      {fileFault && <p class="bad" role="alert">{fileFault}</p>}
    </>
  );
}
