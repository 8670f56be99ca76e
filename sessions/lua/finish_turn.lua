-- prefix, id, tail, status, advance, now, log ttl, own worker if only an orphan may be ended, else ''
local id, advance, now = ARGV[2], ARGV[5], ARGV[6]
local key = turn_key(id)
if field(key, 'status') ~= 'in_progress' then
  -- Sent twice is done once; a turn that is gone was deleted meanwhile.
  if field(key, 'tail') == ARGV[3] then return 1 end
  return 0
end
if ARGV[8] ~= '' and has_worker(key, ARGV[8]) then return 0 end
redis.call('HSET', key, 'status', ARGV[4], 'tail', ARGV[3])
redis.call('HDEL', key, 'worker', 'cancel')
redis.call('EXPIRE', log_key(id), ARGV[7])
local conversation = field(key, 'conv')
if conversation ~= '' and field(conversation_key(conversation), 'active') == id then
  redis.call('HDEL', conversation_key(conversation), 'active')
  if advance == '1' then redis.call('HSET', conversation_key(conversation), 'leaf', id) end
  touch(conversation, now)
end
return 1
