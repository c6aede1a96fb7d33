import { useState } from "preact/hooks";
import type { Input, Medium } from "./playground-requests";
import { formatBytes } from "./format";

type Kind = "image" | "document" | "audio";

/** A file that was attached. `data` is a data URI; `text` stands beside it in its item. */
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
const OF_TEXT = new Set(["csv", "html", "md", "txt"]); // formats that the content does not tell

/** The kinds of files that a model takes. */
export const acceptedKinds = (inputs: string[]): Kind[] => (Object.keys(ACCEPTED) as Kind[]).filter((kind) => inputs.includes(kind));

const kindOf = (file: File): Kind => (file.type.startsWith("image/") ? "image" : file.type.startsWith("audio/") ? "audio" : "document");

const read = (file: File): Promise<string> =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

/** The files of those kinds, and the names of those that cannot be used. */
export async function readAttachments(files: Iterable<File>, kinds: Kind[]): Promise<{ attachments: Attachment[]; refused: string[] }> {
  const attachments: Attachment[] = [];
  const refused: string[] = [];
  for (const file of files) {
    const kind = kindOf(file);
    try {
      if (!kinds.includes(kind)) throw new TypeError(kind);
      attachments.push({ name: file.name, kind, data: await read(file), bytes: file.size, text: "" });
    } catch {
      refused.push(file.name);
    }
  }
  return { attachments, refused };
}

/** The input that a file is sent as. */
export function inputOf({ kind, name, data, text }: Attachment): Input {
  const format = name.split(".").at(-1)?.toLowerCase() ?? "";
  const medium: Medium = kind === "document" && OF_TEXT.has(format) ? { data, format } : data;
  const words = text.trim() ? { text: text.trim() } : {};
  return kind === "image" ? { ...words, images: [medium] } : kind === "audio" ? { ...words, audio: medium } : { document: medium };
}

/** Files to pick or to drop. `texts`: whether a text may stand beside each; `pasted`: whether what is pasted comes here. */
export function Files(props: {
  id: string;
  label: string;
  kinds: Kind[];
  files: Attachment[];
  onChange: (change: (old: Attachment[]) => Attachment[]) => void;
  refused: string[];
  onFiles: (files: Iterable<File>) => void;
  texts?: boolean;
  pasted?: boolean;
}) {
  const [over, setOver] = useState(false);
  const { files, onChange } = props;
  return (
    <div
      class={`drop ${over ? "on" : ""}`}
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
        <span>{props.label}<small>{props.pasted ? " · pick, drop or paste" : " · pick or drop"}</small></span>
        <input
          id={props.id}
          type="file"
          multiple
          accept={props.kinds.map((kind) => ACCEPTED[kind]).join(",")}
          onChange={(event) => {
            props.onFiles([...(event.currentTarget.files ?? [])]);
            event.currentTarget.value = ""; // so that the same file can be picked again
          }}
        />
      </label>
      {props.refused.length > 0 && <p class="bad" role="alert">{`The model does not take ${props.refused.join(", ")}`}</p>}
      {files.length > 0 && (
        <ul class="files">
          {files.map((file) => (
            <li>
              {file.kind === "image" ? <img src={file.data} alt="" /> : <span class="icon" aria-hidden="true">{file.kind === "audio" ? "♪" : "≡"}</span>}
              <span class="name">{file.name}<small>{formatBytes(file.bytes)}</small></span>
              {props.texts && file.kind !== "document" && (
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
