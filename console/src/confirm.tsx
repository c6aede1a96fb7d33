import { useEffect, useRef } from "preact/hooks";

/** A question before what cannot be taken back. It has the focus, which goes back when it is gone; Escape says no. */
export function Confirm({ name, question, yes, id, onYes, onNo }: { name: string; question: string; yes: string; id?: string; onYes: () => void; onNo: () => void }) {
  const button = useRef<HTMLButtonElement>(null);
  useEffect(() => {
    const before = document.activeElement;
    button.current?.focus();
    return () => {
      if (before instanceof HTMLElement) before.focus();
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
