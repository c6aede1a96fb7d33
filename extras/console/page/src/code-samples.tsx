import { useState } from "preact/hooks";
import type { Program } from "./code";

/** Show programs, each with a button that copies it. `open` shows them unfolded and without their names. */
export function CodeSamples({ programs, title, open = false }: { programs: Program[]; title: string; open?: boolean }) {
  const [result, setResult] = useState<{ name: string; isCopied: boolean }>();
  return (
    <div class="row copies">
      {title && <span class="dim">{title}</span>}
      {programs.map(({ name, preview, full }) => {
        const button = (
          <button type="button" data-copies={name} onClick={() => copyText(full()).then((isCopied) => setResult({ name, isCopied }))}>
            {result?.name === name ? (result.isCopied ? "Copied" : "The browser does not allow it") : open ? "Copy" : `Copy as ${name}`}
          </button>
        );
        const code = <pre class="code" data-kind={name}>{preview}</pre>;
        return open ? <>{code}{button}</> : <details><summary>{name}</summary>{button}{code}</details>;
      })}
    </div>
  );
}

/** Copy a text to the clipboard. Return true if it succeeded. A page over plain HTTP has no `navigator.clipboard`. */
async function copyText(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "unseen";
    document.body.append(area);
    area.focus();
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    return isCopied;
  }
}
