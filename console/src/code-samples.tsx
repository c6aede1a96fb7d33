import { useState } from "preact/hooks";
import type { Program } from "./code";

/** The same as programs to copy. `open`: they are seen at once, without their names. */
export function CodeSamples({ programs, title, open = false }: { programs: Program[]; title: string; open?: boolean }) {
  const [copied, setCopied] = useState("");
  return (
    <div class="row copies">
      {title && <span class="dim">{title}</span>}
      {programs.map(({ name, shown, whole }) => {
        const button = (
          <button type="button" data-copies={name} onClick={() => copy(whole()).then((done) => setCopied(done ? name : `no ${name}`))}>
            {copied === name ? "Copied" : copied === `no ${name}` ? "The browser does not allow it" : open ? "Copy" : `Copy as ${name}`}
          </button>
        );
        const text = <pre class="code" data-kind={name}>{shown}</pre>;
        return open ? <>{text}{button}</> : <details><summary>{name}</summary>{button}{text}</details>;
      })}
    </div>
  );
}

/** Whether a text is on the clipboard now. A page that came over plain HTTP has no `navigator.clipboard`. */
async function copy(text: string): Promise<boolean> {
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
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
