-- prefix, id
if field(turn_key(ARGV[2]), 'status') == 'in_progress' then redis.call('HSET', turn_key(ARGV[2]), 'cancel', '1') end
return 1
