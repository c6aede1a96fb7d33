import { useState } from "preact/hooks";
import type { Input, Medium } from "./playground-requests";
import { formatBytes } from "./format";

type Kind = "image" | "document" | "audio";

/** An attached file. `data` is a data URI; `text` goes into the same item as the file. */
export interface Attachment {
  name: string;
  kind: Kind;
  data: string;
  bytes: number;
  text: string;
}

const ACCEPTED: Record<Kind, string> = {
  image: "image/*",
  document: ".pdf,.docx,.pptx,.xlsx,.odt,.ods,.odp,.html,.md,.csv,.txt",
  audio: "audio/*",
};
const TEXT_FORMATS = new Set(["csv", "html", "md", "txt"]); // the server cannot detect these from the content

/** Return the kinds of files that a model takes. */
export const acceptedKinds = (inputs: string[]): Kind[] => (Object.keys(ACCEPTED) as Kind[]).filter((kind) => inputs.includes(kind));

const kindOf = (file: File): Kind => (file.type.startsWith("image/") ? "image" : file.type.startsWith("audio/") ? "audio" : "document");

const readDataUri = (file: File): Promise<string> =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

/** Read the files of these kinds. Return them, and as texts which files the model does not take and which cannot be read. */
export async function readAttachments(files: Iterable<File>, kinds: Kind[]): Promise<{ attachments: Attachment[]; refused: string[] }> {
  const attachments: Attachment[] = [];
  const unsupported: string[] = [];
  const unreadable: string[] = [];
  for (const file of files) {
    const kind = kindOf(file);
    if (!kinds.includes(kind)) {
      unsupported.push(file.name);
      continue;
    }
    try {
      attachments.push({ name: file.name, kind, data: await readDataUri(file), bytes: file.size, text: "" });
    } catch (error) {
      unreadable.push(`${file.name} could not be read: ${(error as DOMException).message}`);
    }
  }
  return { attachments, refused: [...(unsupported.length ? [`The model does not take ${unsupported.join(", ")}`] : []), ...unreadable] };
}

/** Return the input of a request for a file. */
export function inputOf({ kind, name, data, text }: Attachment): Input {
  const format = name.split(".").at(-1)?.toLowerCase() ?? "";
  const medium: Medium = kind === "document" && TEXT_FORMATS.has(format) ? { data, format } : data;
  const caption = text.trim() ? { text: text.trim() } : {};
  return kind === "image" ? { ...caption, images: [medium] } : kind === "audio" ? { ...caption, audio: medium } : { document: medium };
}

/** A field for files to pick or to drop. `hasTexts` adds a field for a text to each file; `acceptsPaste` says in the label
 * that files can be pasted. */
export function Files(props: {
  id: string;
  label: string;
  kinds: Kind[];
  files: Attachment[];
  onChange: (change: (old: Attachment[]) => Attachment[]) => void;
  refused: string[];
  onFiles: (files: Iterable<File>) => void;
  hasTexts?: boolean;
  acceptsPaste?: boolean;
}) {
  const [isOver, setOver] = useState(false);
  const { files, onChange } = props;
  return (
    <div
      class={`drop ${isOver ? "on" : ""}`}
      role="group"
      aria-label={props.label}
      onDragOver={(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={() => setOver(false)}
      onDrop={(event) => {
        event.preventDefault();
        event.stopPropagation();
        setOver(false);
        props.onFiles([...(event.dataTransfer?.files ?? [])]);
      }}
    >
      <label>
        <span>{props.label}<small>{props.acceptsPaste ? " · pick, drop or paste" : " · pick or drop"}</small></span>
        <input
          id={props.id}
          type="file"
          multiple
          accept={props.kinds.map((kind) => ACCEPTED[kind]).join(",")}
          onChange={(event) => {
            props.onFiles([...(event.currentTarget.files ?? [])]);
            event.currentTarget.value = ""; // allows the user to pick the same file again
          }}
        />
      </label>
      {props.refused.map((text) => <p class="bad" role="alert">{text}</p>)}
      {files.length > 0 && (
        <ul class="files">
          {files.map((file) => (
            <li>
              {file.kind === "image" ? <img src={file.data} alt="" /> : <span class="icon" aria-hidden="true">{file.kind === "audio" ? "♪" : "≡"}</span>}
              <span class="name">{file.name}<small>{formatBytes(file.bytes)}</small></span>
              {props.hasTexts && file.kind !== "document" && (
                <input
                  aria-label={`Text beside ${file.name}`}
                  placeholder="text beside it"
                  value={file.text}
                  onInput={(event) => {
                    const text = event.currentTarget.value;
                    onChange((old) => old.map((entry) => (entry === file ? { ...entry, text } : entry)));
                  }}
                />
              )}
              <button type="button" aria-label={`Remove ${file.name}`} onClick={() => onChange((old) => old.filter((entry) => entry !== file))}>×</button>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}
