/** Similarities and projections of vectors. */

const dot = (a: number[], b: number[]): number => a.reduce((sum, value, index) => sum + value * (b[index] ?? 0), 0);
export const norm = (a: number[]): number => Math.sqrt(dot(a, a));
export const cosine = (a: number[], b: number[]): number => dot(a, b) / (norm(a) * norm(b) || 1);

/** Return the cosines of all pairs, shape (n, n). A vector of zeros has the cosine 0 with each vector. */
export function cosines(vectors: number[][]): number[][] {
  const norms = vectors.map(norm);
  return vectors.map((a, i) => vectors.map((b, j) => dot(a, b) / ((norms[i] ?? 0) * (norms[j] ?? 0) || 1)));
}

/** Return the first two principal components of the vectors, shape (n, 2): the eigenvectors of the centred Gram matrix,
 * by power iteration with deflation. */
export function principalComponents(vectors: number[][]): [number, number][] {
  const count = vectors.length;
  const width = vectors[0]?.length ?? 0;
  const mean = Array.from({ length: width }, (_, index) => vectors.reduce((sum, v) => sum + (v[index] ?? 0), 0) / count);
  const centred = vectors.map((v) => v.map((value, index) => value - (mean[index] ?? 0)));
  const gram = centred.map((a) => centred.map((b) => dot(a, b)));
  const axes: number[][] = [];
  for (let axis = 0; axis < 2; axis++) {
    let vector = gram.map((_, index) => Math.cos(index * (axis + 1) + 1)); // a start that is not orthogonal to the eigenvector
    for (let step = 0; step < 200; step++) {
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
  return vectors.map((_, index) => [axes[0]?.[index] ?? 0, axes[1]?.[index] ?? 0]);
}

/** Return the products of all rows of a query with all rows of a document, shape (query rows, document rows). */
export const dotProducts = (query: number[][], document: number[][]): number[][] => query.map((row) => document.map((column) => dot(row, column)));

/** Return the best row of the document for each row of the query, with their product, and the sum of these products: the
 * score MaxSim. */
export function maxSim(products: number[][]): { best: { index: number; value: number }[]; sum: number } {
  const best = products.map((row) => row.reduce((best, value, index) => (value > best.value ? { index, value } : best), { index: -1, value: -Infinity }));
  return { best, sum: best.reduce((sum, { value }) => sum + value, 0) };
}
