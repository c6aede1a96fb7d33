/** Figures over dense vectors. */

export const dot = (a: number[], b: number[]): number => a.reduce((sum, value, place) => sum + value * (b[place] ?? 0), 0);
export const norm = (a: number[]): number => Math.sqrt(dot(a, a));
export const cosine = (a: number[], b: number[]): number => dot(a, b) / (norm(a) * norm(b) || 1);

/** Cosines of all against all, shape (n, n). A vector of zeros has the cosine 0 with every other. */
export function cosines(vectors: number[][]): number[][] {
  const norms = vectors.map(norm);
  return vectors.map((a, i) => vectors.map((b, j) => dot(a, b) / ((norms[i] ?? 0) * (norms[j] ?? 0) || 1)));
}

/** The first two principal components of the vectors, shape (n, 2): eigenvectors of the centred Gram matrix, by power
 * iteration with deflation. */
export function principalComponents(vectors: number[][]): [number, number][] {
  const count = vectors.length;
  const width = vectors[0]?.length ?? 0;
  const mean = Array.from({ length: width }, (_, place) => vectors.reduce((sum, v) => sum + (v[place] ?? 0), 0) / count);
  const centred = vectors.map((v) => v.map((value, place) => value - (mean[place] ?? 0)));
  const gram = centred.map((a) => centred.map((b) => dot(a, b)));
  const axes: number[][] = [];
  for (let axis = 0; axis < 2; axis++) {
    let vector = gram.map((_, place) => Math.cos(place * (axis + 1) + 1)); // any start that no eigenvector is orthogonal to
    for (let turn = 0; turn < 200; turn++) {
      const next = gram.map((row) => dot(row, vector));
      const size = norm(next);
      if (size < 1e-12) {
        vector = vector.map(() => 0);
        break;
      }
      vector = next.map((value) => value / size);
    }
    const value = dot(gram.map((row) => dot(row, vector)), vector);
    axes.push(vector.map((coordinate) => coordinate * Math.sqrt(Math.max(0, value))));
    gram.forEach((row, i) => row.forEach((_, j) => (row[j] = (row[j] ?? 0) - value * (vector[i] ?? 0) * (vector[j] ?? 0))));
  }
  return vectors.map((_, place) => [axes[0]?.[place] ?? 0, axes[1]?.[place] ?? 0]);
}

/** Products of all rows of a query with all rows of a document, shape (query rows, document rows). */
export const dotProducts = (query: number[][], document: number[][]): number[][] => query.map((row) => document.map((column) => dot(row, column)));

/** For each row of the query its best row of the document, and the product with it; their sum is the score (MaxSim). */
export function maxSim(map: number[][]): { best: { at: number; value: number }[]; sum: number } {
  const best = map.map((row) => row.reduce((best, value, at) => (value > best.value ? { at, value } : best), { at: -1, value: -Infinity }));
  return { best, sum: best.reduce((sum, { value }) => sum + value, 0) };
}
