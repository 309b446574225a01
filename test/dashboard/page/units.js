// The units of Grafana that the dashboard has.
const short = (value, decimals) => {
  const power = [["T", 1e12], ["G", 1e9], ["M", 1e6], ["K", 1e3]].find(([, p]) => Math.abs(value) >= p);
  return power ? `${round(value / power[1], 3)} ${power[0]}` : round(value, decimals === undefined ? 3 : decimals + 3);
};

const round = (value, digits) => String(Number(value.toPrecision(Math.max(digits, 1))));

const scaled = (steps) => (value) => {
  if (value === 0) return `0 ${steps.at(0)[0]}`;
  const [name, size] = steps.filter(([, s]) => Math.abs(value) >= s).at(-1) ?? steps[0];
  return `${round(value / size, 3)} ${name}`;
};

const seconds = scaled([["ns", 1e-9], ["µs", 1e-6], ["ms", 1e-3], ["s", 1], ["mins", 60], ["hours", 3600], ["days", 86400]]);

const units = {
  short,
  bytes: scaled([["B", 1], ["KiB", 2 ** 10], ["MiB", 2 ** 20], ["GiB", 2 ** 30], ["TiB", 2 ** 40]]),
  percentunit: (value, decimals) => `${decimals === 0 ? Math.round(value * 100) : round(value * 100, 3)}%`,
  s: (value) => (value === 0 ? "0 s" : seconds(value)),
  reqps: (value) => `${round(value, 3)} req/s`,
  ops: (value) => `${short(value)} ops/s`,
};

export function format(unit, value, decimals) {
  if (!(unit in units)) throw new Error(`unknown unit ${unit}`);
  return units[unit](value, decimals);
}
