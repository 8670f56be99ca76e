-- Every script starts with this. ARGV[1] is the prefix of all keys.
local P = ARGV[1]

local function turn_key(id) return P .. 'turn:' .. id end
local function log_key(id) return P .. 'log:' .. id end
local function conversation_key(id) return P .. 'conv:' .. id end
local function turns_key(id) return P .. 'turns:' .. id end
local function list_key(owner) return P .. 'convs:' .. owner end

local function field(key, name)
  local value = redis.call('HGET', key, name)
  if value then return value end
  return ''
end

-- A conversation changed: its rev grows and it moves to the top of its owner's list.
local function touch(id, now)
  local key = conversation_key(id)
  redis.call('HSET', key, 'updated', now)
  redis.call('ZADD', list_key(field(key, 'owner')), now, id)
  return redis.call('HINCRBY', key, 'rev', 1)
end

-- Whether a process other than `own` writes this turn, and is alive.
local function has_worker(turn, own)
  local worker = field(turn, 'worker')
  return worker ~= '' and worker ~= own and redis.call('EXISTS', P .. 'worker:' .. worker) == 1
end

-- Take a turn out of the tree. One that others go on from stays as a link that nobody can name; a link goes with
-- the last turn that needed it. Returns the nearest turn above it that is still visible, or ''.
local function remove_turn(id)
  local key = turn_key(id)
  local parent = field(key, 'parent')
  local conversation = field(key, 'conv')
  local visible = parent
  while visible ~= '' and field(turn_key(visible), 'deleted') ~= '' do
    visible = field(turn_key(visible), 'parent')
  end
  redis.call('DEL', log_key(id))
  if conversation ~= '' then redis.call('ZREM', turns_key(conversation), id) end
  if tonumber(redis.call('HGET', key, 'children') or '0') > 0 then
    redis.call('HSET', key, 'deleted', '1')
    return visible
  end
  redis.call('DEL', key)
  while parent ~= '' and redis.call('EXISTS', turn_key(parent)) == 1 do
    local left = redis.call('HINCRBY', turn_key(parent), 'children', -1)
    if left > 0 or field(turn_key(parent), 'deleted') == '' then break end
    local above = field(turn_key(parent), 'parent')
    redis.call('DEL', turn_key(parent))
    parent = above
  end
  return visible
end
