import { useEffect, useRef } from "preact/hooks";

/** Ask before an action that cannot be undone. The question takes the focus and gives it back at its end; Escape answers no. */
export function Confirm({ name, question, yes, id, onYes, onNo }: { name: string; question: string; yes: string; id?: string; onYes: () => void; onNo: () => void }) {
  const button = useRef<HTMLButtonElement>(null);
  useEffect(() => {
    const focused = document.activeElement;
    button.current?.focus();
    return () => {
      if (focused instanceof HTMLElement) focused.focus();
    };
  }, []);
  return (
    <p class="row" role="alertdialog" aria-label={name} onKeyDown={(event) => event.key === "Escape" && onNo()}>
      {question}
      <button type="button" id={id} class="certain" ref={button} onClick={onYes}>{yes}</button>
      <button type="button" class="keep" onClick={onNo}>Keep</button>
    </p>
  );
}
