// What the README of postgres.js describes, used as it describes it: its npm package holds no tests.
// Usage: node uses.js URL REPORT [NAME...]; one JSON object a test in REPORT.
import assert from 'node:assert/strict'
import { appendFileSync, writeFileSync } from 'node:fs'
import { Readable } from 'node:stream'
import { pipeline } from 'node:stream/promises'
import postgres from 'postgres'

const [url, report, ...only] = process.argv.slice(2)
const SECONDS_MAX = 20
const uses = {}
const quiet = { onnotice() {}, max: 4, idle_timeout: 5, connect_timeout: 15 }
const rejected = async (promise, code) => {
  const error = await promise.then(() => null, found => found)
  assert.equal(error && error.code, code, error && error.message)
  return error
}

uses['a query has rows, count, command and columns'] = async sql => {
  const result = await sql`select 1 as a, 'x' as b`
  assert.deepEqual([...result], [{ a: 1, b: 'x' }])
  assert.deepEqual([result.count, result.command, result.columns.map(c => c.name).join()], [1, 'SELECT', 'a,b'])
  assert.ok(result.state.pid > 0)
}
uses['parameters keep their types'] = async sql => {
  const when = new Date('2024-02-03T04:05:06.789Z')
  const [row] = await sql`select ${1}::int as i, ${'é'}::text as t, ${true}::bool as b, ${when}::timestamptz as w,
    ${sql.json({ a: [1, null] })}::jsonb as j, ${Buffer.from([0, 255])}::bytea as y, ${null}::text as n`
  assert.deepEqual({ ...row, w: row.w.toISOString(), y: [...row.y] },
    { i: 1, t: 'é', b: true, w: when.toISOString(), j: { a: [1, null] }, y: [0, 255], n: null })
}
uses['arrays of every fetched type'] = async sql => {
  const [row] = await sql`select ${[1, 2, 3]}::int[] as i, ${['a', 'b,"c']}::text[] as t,
    '{{1,2},{3,4}}'::int[] as d`
  assert.deepEqual({ ...row }, { i: [1, 2, 3], t: ['a', 'b,"c'], d: [[1, 2], [3, 4]] })
}
uses['bigint and numeric are strings, or BigInt when asked for'] = async sql => {
  assert.deepEqual([...(await sql`select 9223372036854775807::bigint as a, 1.10::numeric as b`)],
    [{ a: '9223372036854775807', b: '1.10' }])
  const big = postgres(url, { ...quiet, types: { bigint: postgres.BigInt } })
  const [row] = await big`select 9223372036854775807::bigint as a`
  await big.end()
  assert.equal(row.a, 9223372036854775807n)
}
uses['inserts, updates and lists from objects'] = async sql => {
  await sql`create table people (id serial primary key, name text, age int)`
  await sql`insert into people ${sql([{ name: 'a', age: 1 }, { name: 'b', age: 2 }], 'name', 'age')}`
  await sql`update people set ${sql({ age: 3 }, 'age')} where name = ${'b'}`
  const rows = await sql`select ${sql(['name', 'age'])} from people where age in ${sql([1, 3])} order by id`
  assert.deepEqual([...rows], [{ name: 'a', age: 1 }, { name: 'b', age: 3 }])
  const changed = await sql`update people set age = data.age::int from (values ${sql([['a', 9]])}) as data (name, age)
    where people.name = data.name returning people.age`
  assert.deepEqual([...changed], [{ age: 9 }])
}
uses['parts of queries'] = async sql => {
  const later = sql`and n > ${3}`
  const rows = await sql`select n from generate_series(1, 6) n where true ${later} order by ${sql('n')} desc`
  assert.deepEqual(rows.map(row => row.n), [6, 5, 4])
}
uses['cursors, stopped and to their end'] = async sql => {
  const seen = []
  await sql`select n from generate_series(1, 10) n`.cursor(3, rows => { seen.push(rows.length) })
  assert.deepEqual(seen, [3, 3, 3, 1])
  let count = 0
  for await (const [row] of sql`select n from generate_series(1, 100) n`.cursor()) {
    if (row.n === 5) break
    count++
  }
  assert.equal(count, 4)
  await sql`select n from generate_series(1, 10) n`.cursor(2, () => sql.CLOSE)
}
uses['forEach'] = async sql => {
  let sum = 0
  await sql`select n from generate_series(1, 1000) n`.forEach(row => { sum += row.n })
  assert.equal(sum, 500500)
}
uses['describe, values and raw'] = async sql => {
  const said = await sql`select ${1}::int as a`.describe()
  assert.deepEqual([said.columns[0].name, said.types], ['a', [23]])
  assert.deepEqual([...(await sql`select 1, 2`.values())], [[1, 2]])
  assert.equal((await sql`select 'x'`.raw())[0][0].toString(), 'x')
}
uses['several statements in one simple query'] = async sql => {
  const found = await sql`select 1 as a; select 2 as b; create temp table gone (x int); drop table gone`.simple()
  assert.deepEqual([found[0][0].a, found[1][0].b], [1, 2])
}
uses['unsafe, prepared and not'] = async sql => {
  assert.equal((await sql.unsafe('select $1::int + 1 as a', [1]))[0].a, 2)
  for (let turn = 0; turn < 3; turn++)
    assert.equal((await sql.unsafe('select $1::int + 1 as a', [turn], { prepare: true }))[0].a, turn + 1)
}
uses['copy from and to streams'] = async sql => {
  await sql`create table copied (a int, b text)`
  await pipeline(Readable.from(Array.from({ length: 5000 }, (_, n) => `${n}\tx${n}\n`)),
    await sql`copy copied from stdin`.writable())
  let text = ''
  for await (const piece of await sql`copy copied to stdout`.readable()) text += piece
  assert.equal(text.split('\n').length, 5001)
  assert.equal((await sql`select count(*)::int as n from copied`)[0].n, 5000)
}
uses['a copy that is given up'] = async sql => {
  await sql`create table half (a int)`
  const stream = await sql`copy half from stdin`.writable()
  stream.on('error', () => {})
  stream.write('1\n')
  stream.destroy(new Error('enough'))
  await new Promise(resolve => stream.on('close', resolve))
  assert.equal((await sql`select count(*)::int as n from half`)[0].n, 0)
}
uses['a query that is cancelled'] = async sql => {
  const long = sql`select pg_sleep(15)`
  const end = rejected(long, '57014')
  await new Promise(resolve => setTimeout(resolve, 300))
  long.cancel()
  await end
  assert.equal((await sql`select 1 as a`)[0].a, 1)
}
uses['a transaction commits, and rolls back on an error'] = async sql => {
  await sql`create table tx (a int)`
  assert.deepEqual(await sql.begin(async sql => {
    await sql`insert into tx values (1)`
    return [...(await sql`select a from tx`)]
  }), [{ a: 1 }])
  await rejected(sql.begin(sql => [sql`insert into tx values (2)`, sql`select 1/0`]), '22012')
  await sql.begin('read only', sql => rejected(sql`insert into tx values (3)`, '25006')).catch(() => {})
  assert.deepEqual([...(await sql`select a from tx`)], [{ a: 1 }])
}
uses['savepoints'] = async sql => {
  await sql`create table saved (a int)`
  await sql.begin(async sql => {
    await sql`insert into saved values (1)`
    await sql.savepoint('inner', async sql => {
      await sql`insert into saved values (2)`
      throw new Error('back')
    }).catch(() => {})
    await sql.savepoint(sql => sql`insert into saved values (3)`)
  })
  assert.deepEqual((await sql`select a from saved order by a`).map(row => row.a), [1, 3])
}
uses['a prepared transaction'] = async sql => {
  await sql`create table two (a int)`
  await sql.begin(async sql => {
    await sql`insert into two values (1)`
    await sql.prepare('two_phases')
  })
  assert.equal((await sql`select count(*)::int as n from two`)[0].n, 0)
  await sql`commit prepared 'two_phases'`
  assert.equal((await sql`select count(*)::int as n from two`)[0].n, 1)
}
uses['concurrent transactions on one pool'] = async sql => {
  await sql`create table many (a int)`
  await Promise.all(Array.from({ length: 30 }, (_, n) => sql.begin(sql => sql`insert into many values (${n})`)))
  assert.equal((await sql`select count(distinct a)::int as n from many`)[0].n, 30)
}
uses['hundreds of queries in one pipeline'] = async () => {
  const one = postgres(url, { ...quiet, max: 1, max_pipeline: 100 })
  const rows = await Promise.all(Array.from({ length: 300 }, (_, n) => one`select ${n}::int as a`))
  await one.end()
  assert.deepEqual(rows.map(([row]) => row.a), Array.from({ length: 300 }, (_, n) => n))
}
uses['an error in the middle of a pipeline is that query\'s alone'] = async () => {
  const one = postgres(url, { ...quiet, max: 1 })
  const found = await Promise.allSettled(Array.from({ length: 9 }, (_, n) => one`select 1 / ${n - 4}::int as a`))
  await one.end()
  assert.deepEqual(found.map(each => each.status === 'fulfilled'), [1, 1, 1, 1, 0, 1, 1, 1, 1].map(Boolean))
}
uses['an error tells its code, position and constraint'] = async sql => {
  await sql`create table bound (a int constraint positive check (a > 0))`
  const error = await rejected(sql`insert into bound values (${-1})`, '23514')
  assert.deepEqual([error.constraint_name, error.table_name, error.severity], ['positive', 'bound', 'ERROR'])
  assert.equal((await rejected(sql.unsafe('select wrong'), '42703')).position, '8')
}
uses['a statement whose table changed is prepared again'] = async () => {
  const one = postgres(url, { ...quiet, max: 1 })
  await one`create table changing (a int)`
  await one`insert into changing values (1)`
  const ask = () => one`select * from changing`
  assert.deepEqual([...(await ask())], [{ a: 1 }])
  await one`alter table changing add column b int default 2`
  await ask().catch(() => {}) // it retries where it can
  assert.deepEqual([...(await ask())], [{ a: 1, b: 2 }])
  await one.end()
}
uses['without prepared statements'] = async () => {
  const bare = postgres(url, { ...quiet, prepare: false })
  assert.equal((await bare`select ${5}::int as a`)[0].a, 5)
  await bare.end()
}
uses['settings of the connection are there in every query'] = async () => {
  const own = postgres(url, { ...quiet, max: 2, connection: {
    application_name: 'uses', search_path: 'pg_catalog', TimeZone: 'Asia/Tokyo', statement_timeout: 9876 } })
  for (let turn = 0; turn < 6; turn++) {
    const [row] = await own`select current_setting('application_name') as a, current_setting('search_path') as s,
      current_setting('TimeZone') as z, current_setting('statement_timeout') as t`
    assert.deepEqual({ ...row }, { a: 'uses', s: 'pg_catalog', z: 'Asia/Tokyo', t: '9876ms' })
  }
  await own.end()
}
uses['a parameter that changes is told'] = async () => {
  const told = {}
  const one = postgres(url, { ...quiet, max: 1, onparameter: (name, value) => { told[name] = value } })
  await one`select 1`
  assert.ok(told.server_version && told.client_encoding === 'UTF8')
  await one`set application_name = 'another'`
  await one`select 1`
  assert.equal(told.application_name, 'another')
  assert.equal(one.parameters.application_name, 'another')
  await one.end()
}
uses['a notice is heard'] = async () => {
  const heard = []
  const one = postgres(url, { ...quiet, max: 1, onnotice: notice => heard.push(notice.message) })
  await one.unsafe("do $$ begin raise notice 'hear'; end $$")
  await one`select 1`
  await one.end()
  assert.ok(heard.includes('hear'), heard.join())
}
uses['listen and notify'] = async sql => {
  const heard = []
  let more
  const next = new Promise(resolve => { more = resolve })
  const listening = await sql.listen('news', payload => { heard.push(payload); if (heard.length === 3) more() })
  for (const word of ['one', 'two', 'three']) await sql.notify('news', word)
  await next
  await listening.unlisten()
  assert.deepEqual(heard, ['one', 'two', 'three'])
}
uses['changes are subscribed to'] = async sql => {
  await sql`create table events (id serial primary key, what text)`
  await sql`create publication events for table events`
  const watch = postgres(url, { ...quiet, publications: 'events' })
  let more
  const next = new Promise(resolve => { more = resolve })
  const { unsubscribe } = await watch.subscribe('insert:events', (row, { command }) => more([row.what, command]))
  await sql`insert into events (what) values ('happened')`
  assert.deepEqual(await next, ['happened', 'insert'])
  await unsubscribe()
  await watch.end({ timeout: 2 })
}
uses['a reserved connection keeps its session'] = async sql => {
  const reserved = await sql.reserve()
  await reserved`create temp table mine (a int)`
  await reserved`insert into mine values (1)`
  assert.equal((await reserved`select a from mine`)[0].a, 1)
  await reserved.release()
}
uses['transformed names and undefined values'] = async () => {
  const camel = postgres(url, { ...quiet, transform: { ...postgres.camel, undefined: null } })
  assert.deepEqual([...(await camel`select 1 as a_b, ${undefined}::int as c_d`)], [{ aB: 1, cD: null }])
  await camel.end()
}
uses['a type of one\'s own'] = async () => {
  const own = postgres(url, { ...quiet, types: { rect: {
    to: 600, from: [600], serialize: ({ x, y }) => `(${x},${y})`,
    parse: text => { const [x, y] = text.slice(1, -1).split(','); return { x: +x, y: +y } } } } })
  assert.deepEqual((await own`select ${own.typed.rect({ x: 1, y: 2 })} as p`)[0].p, { x: 1, y: 2 })
  await own.end()
}
uses['a large row and a large parameter'] = async sql => {
  const text = 'x'.repeat(3_000_000)
  assert.equal((await sql`select ${text}::text as t`)[0].t.length, text.length)
}
uses['a wrong password and a wrong database are told'] = async () => {
  for (const [change, code] of [[{ password: 'wrong' }, '28P01'], [{ database: 'nowhere' }, '3D000']]) {
    const bad = postgres(url, { ...quiet, ...change })
    await rejected(bad`select 1`, code)
    await bad.end()
  }
}
uses['several hosts, the one that takes writes'] = async () => {
  const { hostname, port } = new URL(url)
  const two = postgres(url, { ...quiet, host: ['127.0.0.1', hostname], port: [1, +port], target_session_attrs: 'read-write' })
  assert.equal((await two`select 1 as a`)[0].a, 1)
  await two.end()
}
uses['connections that live shortly are made again'] = async () => {
  const brief = postgres(url, { ...quiet, max: 1, max_lifetime: 1 })
  const first = (await brief`select 1 as a`)[0].a
  await new Promise(resolve => setTimeout(resolve, 1200))
  assert.equal((await brief`select 1 as a`)[0].a, first)
  await brief.end()
}
uses['an end waits for what runs'] = async () => {
  const one = postgres(url, { ...quiet, max: 1 })
  const running = one`select 1 as a from pg_sleep(0.3)`.execute()
  await one.end({ timeout: 5 })
  assert.equal((await running)[0].a, 1)
  await rejected(one`select 1`, 'CONNECTION_ENDED')
}

let failing = () => {}
for (const kind of ['uncaughtException', 'unhandledRejection']) process.on(kind, error => failing(error))
writeFileSync(report, '')
for (const [name, use] of Object.entries(uses)) {
  if (only.length && !only.includes(name)) continue
  const sql = postgres(url, quiet)
  let timer
  const late = new Promise((_, reject) => {
    failing = reject
    timer = setTimeout(() => reject(new Error(`not within ${SECONDS_MAX} s`)), SECONDS_MAX * 1000)
  })
  let detail = ''
  await Promise.race([Promise.resolve().then(() => use(sql)), late]).catch(error => { detail = String(error && error.stack || error) || 'failed' })
  clearTimeout(timer)
  await sql.end({ timeout: 1 }).catch(() => {})
  appendFileSync(report, JSON.stringify({ test: name, verdict: detail ? 'failed' : 'passed', detail }) + '\n')
}
process.exit(0)
