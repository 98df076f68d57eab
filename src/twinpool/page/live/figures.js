// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const NONE = "–";

export const count = (number) => whole.format(number);
export const tokens = (number) => short.format(number);
export const percent = (ratio) => (ratio == null ? NONE : `${whole.format(ratio * 100)}%`);

export function seconds(value) {
  if (value == null) return NONE;
  if (value < 0.9995) return `${whole.format(value * 1000)} ms`;
  return `${Number(value.toPrecision(3))} s`;
}

export function age(value) {
  if (value < 60) return `${Math.round(value)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
