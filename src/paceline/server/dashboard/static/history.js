// The samples of the last minutes, as the columns that charts are drawn from.

const KEPT = 300;

export class History {
  samples = [];

  add(samples) {
    this.samples = [...this.samples, ...samples].slice(-KEPT);
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

  /** {key: values} for a field that is an object; a key that a sample lacks is null there. */
  columns(field) {
    const keys = [...new Set(this.samples.flatMap((sample) => Object.keys(sample[field] ?? {})))].sort();
    return Object.fromEntries(keys.map((key) => [key, this.column((sample) => sample[field]?.[key])]));
  }

  /** Pairs of times between which `holds`. */
  spans(holds) {
    const spans = [];
    let from = null;
    for (const sample of this.samples) {
      if (holds(sample)) from ??= sample.time;
      else if (from !== null) {
        spans.push([from, sample.time]);
        from = null;
      }
    }
    return from === null ? spans : [...spans, [from, this.last.time]];
  }
}
