/** Returns a function `next(n)`, which returns pseudo-random integers from 0 to `n - 1`. The same seed gives the same integers. */
export function randomIntegers(seed) {
  let state = seed;
  return (n) => {
    state = (Math.imul(state, 1103515245) + 12345) & 0x7fffffff;
    return (state >> 8) % n;
  };
}
