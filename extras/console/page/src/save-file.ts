const URL_LIFE_MS = 60_000; // the browser has read the file by then

/** Save bytes as a file on the machine of the user. Files that need a key are fetched first: a link would send no key. */
export function saveFile(data: Uint8Array, name: string): void {
  const url = URL.createObjectURL(new Blob([data as Uint8Array<ArrayBuffer>]));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  window.setTimeout(() => URL.revokeObjectURL(url), URL_LIFE_MS);
}
