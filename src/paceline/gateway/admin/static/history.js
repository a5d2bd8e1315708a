// The samples of the last minutes, as columns for the charts.

const MAX_SAMPLES = 300;

export class History {
  samples = [];

  constructor(most = MAX_SAMPLES) {
    this.most = most;
  }

  add(samples) {
    this.samples = [...this.samples, ...samples].slice(-this.most);
  }

  get last() {
    return this.samples.at(-1);
  }

  get times() {
    return this.samples.map((sample) => sample.time);
  }

  column(read) {
    return this.samples.map((sample) => read(sample) ?? null);
  }

  /** {key: values} of a field that is an object; null where a sample lacks the key. */
  columns(field) {
    const keys = [...new Set(this.samples.flatMap((sample) => Object.keys(sample[field] ?? {})))].sort();
    return Object.fromEntries(keys.map((key) => [key, this.column((sample) => sample[field]?.[key])]));
  }

  /** Pairs of times between which `condition` is true. */
  spans(condition) {
    const spans = [];
    let from = null;
    for (const sample of this.samples) {
      if (condition(sample)) from ??= sample.time;
      else if (from !== null) {
        spans.push([from, sample.time]);
        from = null;
      }
    }
    return from === null ? spans : [...spans, [from, this.last.time]];
  }
}
