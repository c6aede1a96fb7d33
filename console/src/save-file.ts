/** Bytes that the gateway gives only to a key, as a file of whoever reads the page: a link would send no key. */

const KEPT_MS = 60_000; // the browser has read a file from the address by then

export function saveFile(data: Uint8Array, name: string): void {
  const url = URL.createObjectURL(new Blob([data as Uint8Array<ArrayBuffer>]));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  window.setTimeout(() => URL.revokeObjectURL(url), KEPT_MS);
}
