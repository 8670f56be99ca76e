-- prefix, id, owner, parent, conversation, worker, head, tail, client message id, now, turn ttl, message ttl
local id, owner, parent, conversation, worker = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local message, now = ARGV[9], ARGV[10]
local key = turn_key(id)
if redis.call('EXISTS', key) == 1 then return {'begun', id} end

local message_key = P .. 'idem:' .. owner .. ':' .. message
if message ~= '' then
  local known = redis.call('GET', message_key)
  if known then return {'duplicate', known} end
end
if conversation ~= '' then
  local conv = conversation_key(conversation)
  if field(conv, 'owner') ~= owner then return {'no_conversation', ''} end
  local active = field(conv, 'active')
  -- A turn whose process is gone holds nobody up, nor does one of this process: it runs one at a time.
  if active ~= '' and has_worker(turn_key(active), worker) then return {'busy', active} end
  if field(conv, 'leaf') ~= parent then return {'moved', ''} end
end
if parent ~= '' then
  local above = turn_key(parent)
  if redis.call('EXISTS', above) == 0 or field(above, 'deleted') ~= '' then return {'no_parent', ''} end
  redis.call('HINCRBY', above, 'children', 1)
end
redis.call('HSET', key, 'owner', owner, 'parent', parent, 'conv', conversation, 'worker', worker,
  'status', 'in_progress', 'head', ARGV[7], 'tail', ARGV[8])
if conversation ~= '' then
  redis.call('HSET', conversation_key(conversation), 'active', id)
  redis.call('ZADD', turns_key(conversation), now, id)
  touch(conversation, now)
else
  redis.call('EXPIRE', key, ARGV[11])
end
if message ~= '' then redis.call('SET', message_key, id, 'EX', ARGV[12]) end
return {'begun', id}
