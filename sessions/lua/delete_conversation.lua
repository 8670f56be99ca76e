-- prefix, id, owner, turn ttl. Returns the ids of its turns, or nothing at all if it is not there.
local id = ARGV[2]
if field(conversation_key(id), 'owner') ~= ARGV[3] then return false end
local turns = redis.call('ZREVRANGE', turns_key(id), 0, -1)
redis.call('DEL', conversation_key(id))
redis.call('ZREM', list_key(ARGV[3]), id)
for _, turn in ipairs(turns) do
  if redis.call('EXISTS', turn_key(turn)) == 1 then remove_turn(turn) end
end
-- Links that turns outside the conversation need are kept no longer than those turns.
for _, turn in ipairs(turns) do
  if redis.call('EXISTS', turn_key(turn)) == 1 then
    redis.call('HSET', turn_key(turn), 'conv', '')
    redis.call('EXPIRE', turn_key(turn), ARGV[4])
  end
end
redis.call('DEL', turns_key(id))
return turns
